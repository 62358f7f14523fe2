// log_softmax: per row the statistics (m, c, T) - maximum, how many columns equal it, sum of
// exp(x_j - m) over the others - and the log-probability of one id. One block per row; the
// log-probabilities of the other columns are not materialised.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <limits>
#include <vector>

#include "error.h"
#include "kernels.h"

namespace dspark::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarp = 32;
constexpr int64_t kIgnoreIndex = -100;

struct Statistics {
  float m, c, t;
};

__device__ float to_float(float x) { return x; }
__device__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ float to_float(__half x) { return __half2float(x); }

// Statistics of two sets of columns together; the order of the arguments fixes the rounding.
__device__ Statistics combine(Statistics a, Statistics b) {
  const float m = fmaxf(a.m, b.m);
  Statistics result{m, 0.f, 0.f};
  // A side whose maximum is lower counts whole. -inf against -inf has nothing to add.
  if (a.m == m) {
    result.c += a.c;
    result.t += a.t;
  } else {
    result.t += (a.c + a.t) * expf(a.m - m);
  }
  if (b.m == m) {
    result.c += b.c;
    result.t += b.t;
  } else {
    result.t += (b.c + b.t) * expf(b.m - m);
  }
  return result;
}

__device__ Statistics from_lane(Statistics s, int offset) {
  return {__shfl_down_sync(0xffffffffu, s.m, offset), __shfl_down_sync(0xffffffffu, s.c, offset),
          __shfl_down_sync(0xffffffffu, s.t, offset)};
}

__device__ Statistics combine_warp(Statistics s) {
  for (int offset = kWarp / 2; offset > 0; offset /= 2) s = combine(s, from_lane(s, offset));
  return s;
}

// Row r begins at base + r / inner * outer_stride + r % inner * inner_stride.
template <class E>
__global__ void __launch_bounds__(kThreads)
    log_softmax_kernel(const E* base, int64_t outer_stride, int64_t inner_stride, int64_t inner,
                       int64_t columns, const int64_t* ids, const uint8_t* active,
                       float* statistics, float* log_prob) {
  const int64_t row = blockIdx.x;
  const E* x = base + row / inner * outer_stride + row % inner * inner_stride;
  if (active != nullptr && active[row] == 0) {
    if (threadIdx.x < 3) statistics[3 * row + threadIdx.x] = 0.f;
    if (threadIdx.x == 0 && log_prob != nullptr) log_prob[row] = 0.f;
    return;
  }

  // Two sweeps, the second over data that the first brought into L2: the thread's maximum, then
  // its sum. A single rescaling sweep would take two exponentials per column.
  Statistics mine{-INFINITY, 0.f, 0.f};
  for (int64_t j = threadIdx.x; j < columns; j += kThreads) mine.m = fmaxf(mine.m, to_float(x[j]));
  for (int64_t j = threadIdx.x; j < columns; j += kThreads) {
    const float v = to_float(x[j]);
    if (v == -INFINITY) continue;
    if (v == mine.m) {
      mine.c += 1.f;
    } else {
      mine.t += expf(v - mine.m);  // NaN passes fmaxf by and arrives here
    }
  }

  __shared__ Statistics partial[kThreads / kWarp];
  mine = combine_warp(mine);
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = mine;
  __syncthreads();
  if (threadIdx.x != 0) return;
  Statistics all = partial[0];
  for (int i = 1; i < kThreads / kWarp; ++i) all = combine(all, partial[i]);
  // As in PyTorch, a row without a finite logit, or with +inf, has no distribution.
  if (isinf(all.m)) all.t = NAN;
  statistics[3 * row] = all.m;
  statistics[3 * row + 1] = all.c;
  statistics[3 * row + 2] = all.t;
  if (log_prob != nullptr) {
    const int64_t id = ids[row];
    if (id == kIgnoreIndex) {
      log_prob[row] = 0.f;
    } else if (id < 0 || id >= columns) {
      log_prob[row] = NAN;
    } else {
      log_prob[row] = (to_float(x[id]) - all.m) - log1pf(all.c - 1.f + all.t);
    }
  }
}

template <class E>
void launch(const LogSoftmaxArgs& args, cudaStream_t stream) {
  const auto& rows = *args.logits;
  const auto layout = rows.two_strides();
  log_softmax_kernel<E><<<static_cast<unsigned>(rows.count()), kThreads, 0, stream>>>(
      static_cast<const E*>(rows.row(0)), layout.outer_stride, layout.inner_stride, layout.inner,
      rows.columns(), args.ids, args.active, args.statistics, args.log_prob);
  DSPARK_CUDA_CHECK(cudaGetLastError());
}

}  // namespace

void log_softmax(const LogSoftmaxArgs& args, int device, void* stream) {
  const DeviceGuard guard(device);
  if (args.logits->count() == 0) return;
  switch (args.logits->dtype()) {
    case DType::kFloat32:
      return launch<float>(args, static_cast<cudaStream_t>(stream));
    case DType::kBFloat16:
      return launch<__nv_bfloat16>(args, static_cast<cudaStream_t>(stream));
    case DType::kFloat16:
      return launch<__half>(args, static_cast<cudaStream_t>(stream));
    case DType::kFloat64:
      break;
  }
  throw std::invalid_argument("log_softmax: float64 logits have no CUDA kernel");
}

}  // namespace dspark::cuda
