// ordered_sum: sums over the first dimension of [rows, columns], in double and in an order that
// follows from the shape alone. One block sums one column.
#include <runtime.h>

#include <stdexcept>

#include "kernels.h"
#include "reduce.h"

namespace dspark::cuda {
namespace {

constexpr int kThreads = 256;

struct Partial {
  double value;
};

// Grid: columns.
template <class Real>
__global__ void __launch_bounds__(kThreads)
    ordered_sum_kernel(const Real* values, Real* sums, int64_t rows, int64_t columns) {
  const int64_t column = block_x();
  Partial mine{0.0};
  for (int64_t row = thread_index(); row < rows; row += kThreads) {
    mine.value += static_cast<double>(load(values + row * columns + column));
  }
  mine = reduce_block<kThreads>(
      mine, Partial{0.0},
      [](const Partial& a, const Partial& b) { return Partial{a.value + b.value}; },
      reinterpret_cast<Partial*>(shared_memory()));
  if (thread_index() == 0) store(sums + column, static_cast<Real>(mine.value));
}

template <class Real>
void launch_sum(const OrderedSumArgs& args, Stream stream) {
  const Shape shape{static_cast<unsigned>(args.columns), 1, 1, kThreads,
                    kThreads / kWarp * static_cast<int>(sizeof(Partial))};
  launch("ordered_sum", ordered_sum_kernel<Real>, shape, stream,
         static_cast<const Real*>(args.values), static_cast<Real*>(args.sums), args.rows,
         args.columns);
}

}  // namespace

void ordered_sum(const OrderedSumArgs& args, int device, void* cuda_stream) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<Stream>(cuda_stream);
  if (args.columns == 0) return;
  if (args.dtype == DType::kFloat64) return launch_sum<double>(args, stream);
  if (args.dtype == DType::kFloat32) return launch_sum<float>(args, stream);
  throw std::invalid_argument("ordered_sum: expected float32 or float64");
}

}  // namespace dspark::cuda
