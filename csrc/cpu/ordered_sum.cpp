// ordered_sum: the sum of each column of [M, C], in double and always in row order. The per-row
// results of a batch are few; what matters is that their sum does not depend on how many threads
// there are.
#include "kernels.h"

namespace dspark::cpu {
namespace {

template <class T>
void sum_columns(const T* values, T* sums, int64_t rows, int64_t columns) {
  for (int64_t column = 0; column < columns; ++column) {
    double total = 0;
    for (int64_t row = 0; row < rows; ++row) {
      total += static_cast<double>(values[row * columns + column]);
    }
    sums[column] = static_cast<T>(total);
  }
}

}  // namespace

void ordered_sum(const OrderedSumArgs& args) {
  if (args.dtype == DType::kFloat64) {
    sum_columns(static_cast<const double*>(args.values), static_cast<double*>(args.sums), args.rows,
                args.columns);
  } else {
    sum_columns(static_cast<const float*>(args.values), static_cast<float*>(args.sums), args.rows,
                args.columns);
  }
}

}  // namespace dspark::cpu
