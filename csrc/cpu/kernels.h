// The CPU kernels' interface: one argument structure per op, and one table of functions per
// instruction-set level. All pointers are the caller's; nothing here allocates.
//
// N rows, V columns. Per-row arrays are contiguous. `Real` is double where either dtype is
// float64 and float otherwise, and the type of every per-row array. S = sum sign(p - q) p travels
// as its two sides, 1 - S and 1 + S: the smaller of them is what the gradient of a confident row
// consists of, and subtracting a rounded S from 1 would leave none of its digits.
#pragma once

#include <cstdint>

#include "../rows.h"

namespace dspark::cpu {

// Columns in one chunk. A chunk of fp32 logits, the same chunk prefetched for the next step and
// its exponentials (24 KiB) fit in a first-level cache.
inline constexpr int64_t kChunkColumns = 2048;

struct LogSoftmaxArgs {
  const Rows* logits;
  const int64_t* ids;     // [N] or null
  const uint8_t* active;  // [N] or null: all
  void* statistics;       // [N, 3] Real: m, c, T
  void* log_prob;         // [N] Real, or null where ids is
  void* scratch;          // threads * chunk_scratch_bytes(V)
  int threads;
};

struct L1DistanceArgs {
  const Rows* draft;
  const Rows* target;
  const uint8_t* active;
  const void* draft_statistics;   // [N, 3] Real
  const void* target_statistics;  // [N, 3] Real
  void* l1;                       // [N] Real
  void* sides;                    // [N, 2] Real: 1 - S, 1 + S
  void* scratch;                  // threads * chunk_scratch_bytes(V)
  int threads;
};

struct GradientArgs {
  const Rows* draft;
  const Rows* target;  // null: no L1 part
  const int64_t* ids;  // null: no CE part
  const uint8_t* active;
  const void* draft_statistics;
  const void* target_statistics;
  const void* sides;           // [N, 2] Real
  const void* ce_coefficient;  // [N] Real, `a`; null: zeros
  const void* l1_coefficient;  // [N] Real, `b`; null: zeros
  const Rows* gradient;        // the draft's dtype
  int threads;
};

struct WeightedArgs {
  const Rows* draft;
  const Rows* target;  // null: l1 is 0
  const int64_t* ids;  // null: ce is 0
  const uint8_t* active;
  const void* ce_coefficient;  // [N] Real; read only when gradient is wanted
  const void* l1_coefficient;
  void* ce;                 // [N] Real
  void* l1;                 // [N] Real
  void* draft_statistics;   // [N, 3] Real, or null
  void* target_statistics;  // [N, 3] Real, or null
  void* sides;              // [N, 2] Real, or null
  const Rows* gradient;     // null: evaluation. May be the draft itself
  void* scratch;            // threads * weighted_scratch_bytes(V, wide)
  int threads;
};

struct ScaleArgs {
  const void* source;
  void* destination;  // may be the source
  DType dtype;
  int64_t count;
  const void* factor;  // one value of factor_dtype, float32 or float64
  DType factor_dtype;
  int threads;
};

struct OrderedSumArgs {
  const void* values;  // [rows, columns], contiguous
  void* sums;          // [columns]
  DType dtype;         // of both, float32 or float64
  int64_t rows;
  int64_t columns;
};

// The kernels that are compiled once per instruction-set level.
struct Kernels {
  const char* name;
  void (*log_softmax)(const LogSoftmaxArgs&);
  void (*l1_distance)(const L1DistanceArgs&);
  void (*gradient)(const GradientArgs&);
  void (*weighted)(const WeightedArgs&);
  void (*scale)(const ScaleArgs&);
  // Bytes of scratch one thread needs. `wide`: Real is double.
  int64_t (*chunk_scratch_bytes)(int64_t columns);
  int64_t (*weighted_scratch_bytes)(int64_t columns, bool wide);
  // Elementwise exp of float32 arguments <= 0; the exponential of every kernel, alone.
  void (*exponential)(const float* x, float* y, int64_t count);
};

const Kernels& kernels_baseline();
#ifdef DSPARK_HAVE_AVX2
const Kernels& kernels_avx2();
#endif

// The level in use: the best this processor has, or the one DSPARK_EXT_CPU_LEVEL names.
// Throws std::invalid_argument for a level that is unknown here.
const Kernels& kernels();

// Space-separated names of the levels this processor can run, best first.
const char* available_levels();

void ordered_sum(const OrderedSumArgs& args);

// Asks for huge pages under memory that has not been touched yet: a fresh gradient of hundreds
// of MiB otherwise spends longer in page faults than in arithmetic. No effect outside Linux.
void advise_huge_pages(void* data, int64_t bytes);

}  // namespace dspark::cpu
