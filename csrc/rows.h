// A matrix of logits as its owner describes it: a pointer, and a stride (in elements) for every
// leading dimension. The last dimension holds the V columns and has stride 1.
#pragma once

#include <cstdint>
#include <vector>

namespace dspark {

enum class DType { kFloat32, kBFloat16, kFloat16, kFloat64 };

inline int64_t element_size(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// The same for device code, where no vector reaches: row r is its index over `sizes`, the last
// dimension running fastest, times `strides`, in bytes. Rows are counted in 32 bits, offsets are
// not.
struct RowLayout {
  static constexpr int kMaxDimensions = 6;

  uintptr_t data;
  int dimensions;
  uint32_t sizes[kMaxDimensions];
  int64_t strides[kMaxDimensions];
};

class Rows {
 public:
  Rows(uintptr_t data, DType dtype, const std::vector<int64_t>& sizes,
       const std::vector<int64_t>& strides, int64_t columns);

  DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  int64_t columns() const { return columns_; }

  // Address of a row's first column.
  void* row(int64_t index) const;

  // Throws std::invalid_argument for more rows, or independent strides, than a layout can hold.
  RowLayout layout() const;

 private:
  uintptr_t data_;
  DType dtype_;
  int64_t columns_;
  int64_t count_ = 1;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

}  // namespace dspark
