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

class Rows {
 public:
  Rows(uintptr_t data, DType dtype, const std::vector<int64_t>& sizes,
       const std::vector<int64_t>& strides, int64_t columns);

  DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  int64_t columns() const { return columns_; }

  // Address of a row's first column.
  void* row(int64_t index) const;

  // The same for device code, where no vector reaches: row r lies at
  // r / inner * outer_stride + r % inner * inner_stride. Throws std::invalid_argument when the
  // leading dimensions do not collapse that far.
  struct TwoStrides {
    int64_t inner, outer_stride, inner_stride;
  };
  TwoStrides two_strides() const;

 private:
  uintptr_t data_;
  DType dtype_;
  int64_t columns_;
  int64_t count_ = 1;
  std::vector<int64_t> sizes_;
  std::vector<int64_t> strides_;
};

}  // namespace dspark
