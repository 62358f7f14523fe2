// The CUDA kernels' interface. Launchers are asynchronous on the stream they are given and
// throw CudaError; all pointers are device memory of the caller's.
#pragma once

#include <cstdint>

#include "../rows.h"

namespace dspark::cuda {

struct LogSoftmaxArgs {
  const Rows* logits;     // float32, bfloat16 or float16
  const int64_t* ids;     // [N] or null
  const uint8_t* active;  // [N] or null: all
  float* statistics;      // [N, 3]: m, c, T
  float* log_prob;        // [N], or null where ids is
};

void log_softmax(const LogSoftmaxArgs& args, int device, void* stream);

}  // namespace dspark::cuda
