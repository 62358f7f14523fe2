// scale: destination = source * factor, the upstream gradient applied to a finished gradient.
// Formed in fp32 and rounded once. The factor is read on the device; nothing is touched when it is
// 1 and the destination is the source, which is the ordinary backward pass.
#include "elements.h"
#include "portable.h"

namespace dspark::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerMultiprocessor = 8;

template <class E>
__global__ void __launch_bounds__(kThreads)
    scale_kernel(const E* source, E* destination, int64_t count, const float* factor_at) {
  const float factor = load_uniform(factor_at);
  if (factor == 1.f && source == destination) return;
  const int64_t thread = block_x() * kThreads + thread_index();
  const int64_t threads = grid_x() * kThreads;
  const bool aligned = is_aligned(source) && is_aligned(destination);
  const int64_t units = aligned ? count / kUnitColumns : 0;
  for (int64_t unit = thread; unit < units; unit += threads) {
    float x[kUnitColumns];
    load_columns(source + unit * kUnitColumns, true, x);
#pragma unroll
    for (float& value : x) value *= factor;
    store_columns(destination + unit * kUnitColumns, true, x);
  }
  for (int64_t i = units * kUnitColumns + thread; i < count; i += threads) {
    store(destination + i, from_float<E>(to_float(load(source + i)) * factor));
  }
}

}  // namespace

void scale(const ScaleArgs& args, int device, void* cuda_stream) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<Stream>(cuda_stream);
  if (args.count == 0) return;
  constexpr int64_t kBlockColumns = int64_t{kThreads} * kUnitColumns;
  const int64_t wanted = (args.count + kBlockColumns - 1) / kBlockColumns;
  const int64_t most = int64_t{current_device().multiprocessors} * kBlocksPerMultiprocessor;
  const Shape shape{static_cast<unsigned>(wanted < most ? wanted : most), 1, 1, kThreads};
  with_element_type(args.dtype, "scale", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    launch("scale", scale_kernel<E>, shape, stream, static_cast<const E*>(args.source),
           static_cast<E*>(args.destination), args.count, args.factor);
  });
}

}  // namespace dspark::cuda
