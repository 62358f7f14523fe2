// Outside the header so that it exists once: an inline function compiled with one level's
// instructions could be the copy that the linker keeps for all of them.
#include "rows.h"

#include <stdexcept>

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

Rows::TwoStrides Rows::two_strides() const {
  switch (sizes_.size()) {
    case 0:
      return {1, 0, 0};
    case 1:
      return {sizes_[0], 0, strides_[0]};
    case 2:
      return {sizes_[1], strides_[0], strides_[1]};
    default:
      throw std::invalid_argument("Rows: more than two independent strides on the device");
  }
}

}  // namespace dspark
