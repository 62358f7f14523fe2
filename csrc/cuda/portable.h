// The path for every device and every row: three ops one after another, each a grid of (column
// splits, rows). The launchers take rows in groups, so small that what one op has read the next one
// finds in the second-level cache.
#pragma once

#include <primitives.h>
#include <runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"

namespace dspark::cuda {

// The one place where a dtype code becomes a type.
template <class F>
void with_element_type(DType dtype, const char* op, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Half*>(nullptr));
    case DType::kFloat64:
      break;
  }
  throw std::invalid_argument(std::string(op) + ": float64 logits have no CUDA kernel");
}

// Rows whose logits fill half of the second-level cache, the other half being for gradients; as
// many as a grid's second dimension holds at most.
inline int64_t group_rows(const Rows& draft, const Rows* target) {
  constexpr int64_t kMaxRows = 65535;
  const int64_t pair =
      element_size(draft.dtype()) + (target == nullptr ? 0 : element_size(target->dtype()));
  const int64_t row_bytes = draft.columns() * pair;
  int64_t rows = current_device().l2_bytes / 2 / (row_bytes > 0 ? row_bytes : 1);
  rows = rows < 1 ? 1 : rows > kMaxRows ? kMaxRows : rows;
  return rows < draft.count() ? rows : draft.count();
}

// Runs f(first, count) for each group of rows.
template <class F>
void for_each_group(const Rows& draft, const Rows* target, F&& f) {
  if (draft.count() == 0) return;
  const int64_t size = group_rows(draft, target);
  for (int64_t first = 0; first < draft.count(); first += size) {
    const int64_t left = draft.count() - first;
    f(first, left < size ? left : size);
  }
}

// Per-row arrays are indexed by row, `parts` from the group's first one.
struct StatisticsGroup {
  const Rows* logits;
  // The operand whose boundaries split the columns: two rows of the same numbers are added up in
  // one order then, whatever their dtypes and alignments, and have no distance.
  const Rows* order;
  int64_t first, count;
  const int64_t* ids;
  const uint8_t* active;
  float* statistics;
  float sign;       // of the cross-entropy in log_prob
  float* log_prob;  // or null
  void* parts;
};

void statistics_of_group(const StatisticsGroup& group, Stream stream);
void distance_of_group(const L1DistanceArgs& args, int64_t first, int64_t count, Stream stream);
void gradient_of_group(const GradientArgs& args, int64_t first, int64_t count, Stream stream);

}  // namespace dspark::cuda
