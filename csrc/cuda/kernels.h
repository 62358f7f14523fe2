// The CUDA kernels' interface. Launchers are asynchronous on the CUDA stream they are given,
// allocate nothing, and throw CudaError; all pointers are device memory of the caller's, per-row
// arrays are contiguous, and logits are float32, bfloat16 or float16, each operand's dtype its own.
#pragma once

#include <cstdint>

#include "../rows.h"

namespace dspark::cuda {

struct LogSoftmaxArgs {
  const Rows* logits;
  const Rows* order;      // the rows in whose order columns are added up; may be the logits
  const int64_t* ids;     // [N] or null
  const uint8_t* active;  // [N] or null: all
  float* statistics;      // [N, 3]: m, c, T
  float* log_prob;        // [N], or null where ids is
  void* scratch;          // scratch_bytes()
};

struct L1DistanceArgs {
  const Rows* draft;
  const Rows* target;
  const uint8_t* active;
  const float* draft_statistics;   // [N, 3]
  const float* target_statistics;  // [N, 3]
  float* l1;                       // [N]
  float* sides;                    // [N, 2]: 1 - S, 1 + S
  void* scratch;                   // scratch_bytes()
};

struct GradientArgs {
  const Rows* draft;
  const Rows* target;  // null: no L1 part
  const int64_t* ids;  // null: no CE part; kElsewhere: the label's column is not among these
  const uint8_t* active;
  const float* draft_statistics;
  const float* target_statistics;
  const float* sides;           // [N, 2]
  const float* ce_coefficient;  // [N], `a`; null: zeros
  const float* l1_coefficient;  // [N], `b`; null: zeros
  const Rows* gradient;         // the draft's dtype; may be the draft
};

struct WeightedArgs {
  const Rows* draft;
  const Rows* target;  // null: the three results that take one stay as they are
  const int64_t* ids;  // null: ce is 0
  const uint8_t* active;
  const float* ce_coefficient;  // [N]; read only when gradient is wanted
  const float* l1_coefficient;
  float* ce;                 // [N]
  float* l1;                 // [N], takes a target
  float* draft_statistics;   // [N, 3]
  float* target_statistics;  // [N, 3], takes a target; only m and c + T are exact
  float* sides;              // [N, 2], takes a target
  const Rows* gradient;      // null: evaluation. May be the draft itself
  void* scratch;             // scratch_bytes()
};

struct ScaleArgs {
  const void* source;
  void* destination;  // may be the source
  DType dtype;
  int64_t count;
  const float* factor;  // one value
};

struct OrderedSumArgs {
  const void* values;  // [rows, columns], contiguous
  void* sums;          // [columns]
  DType dtype;         // of both, float32 or float64
  int64_t rows;
  int64_t columns;
};

void log_softmax(const LogSoftmaxArgs& args, int device, void* stream);
void l1_distance(const L1DistanceArgs& args, int device, void* stream);
void gradient(const GradientArgs& args, int device, void* stream);
void weighted(const WeightedArgs& args, int device, void* stream);
void scale(const ScaleArgs& args, int device, void* stream);
void ordered_sum(const OrderedSumArgs& args, int device, void* stream);

// How `weighted` would run on the device: the cluster of blocks that holds a row pair, the units of
// eight columns in each block, and a block's bytes of shared memory; cluster 0 for rows that the
// portable ops take.
struct ResidentPlan {
  int cluster = 0;
  int units = 0;
  int shared_bytes = 0;
};
ResidentPlan weighted_plan(const Rows& draft, const Rows* target, const Rows* gradient, int device);

// Bytes that log_softmax, l1_distance and weighted need at `scratch` for these operands.
int64_t scratch_bytes(const Rows& draft, const Rows* target, int device);

}  // namespace dspark::cuda
