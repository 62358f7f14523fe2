// Outside the header so that it exists once: an inline function compiled with one level's
// instructions could be the copy that the linker keeps for all of them.
#include "rows.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace dspark {

Rows::Rows(uintptr_t data, DType dtype, const std::vector<int64_t>& sizes,
           const std::vector<int64_t>& strides, int64_t columns)
    : data_(data), dtype_(dtype), columns_(columns) {
  if (sizes.size() != strides.size()) {
    throw std::invalid_argument("Rows: one stride per leading dimension is required");
  }
  // Neighbouring dimensions that lie back to back become one, so that almost every matrix ends
  // with a single stride and row() with a single multiplication.
  for (size_t i = 0; i < sizes.size(); ++i) {
    count_ *= sizes[i];
    if (sizes[i] == 1) continue;
    if (!sizes_.empty() && strides_.back() == strides[i] * sizes[i]) {
      sizes_.back() *= sizes[i];
      strides_.back() = strides[i];
    } else {
      sizes_.push_back(sizes[i]);
      strides_.push_back(strides[i]);
    }
  }
}

void* Rows::row(int64_t index) const {
  // Element offsets of one tensor pass 2^31 in ordinary use, hence 64 bits throughout.
  int64_t offset = 0;
  for (size_t i = sizes_.size(); i-- > 0;) {
    const int64_t next = i > 0 ? index / sizes_[i] : 0;
    offset += (index - next * sizes_[i]) * strides_[i];
    index = next;
  }
  return reinterpret_cast<void*>(data_ + static_cast<uintptr_t>(offset * element_size(dtype_)));
}

RowLayout Rows::layout() const {
  if (sizes_.size() > RowLayout::kMaxDimensions) {
    throw std::invalid_argument("Rows: more than " + std::to_string(RowLayout::kMaxDimensions) +
                                " independent leading strides; make the tensor contiguous");
  }
  if (count_ > std::numeric_limits<int32_t>::max()) {
    throw std::invalid_argument("Rows: " + std::to_string(count_) +
                                " rows; a device kernel takes at most 2^31 - 1 at once");
  }
  RowLayout layout{};
  layout.data = data_;
  layout.dimensions = static_cast<int>(sizes_.size());
  for (size_t i = 0; i < sizes_.size(); ++i) {
    layout.sizes[i] = static_cast<uint32_t>(sizes_[i]);
    layout.strides[i] = strides_[i] * element_size(dtype_);
  }
  return layout;
}

}  // namespace dspark
