// How the blocks of a row share its columns: units of eight on 16-byte boundaries of the first
// operand, and the few columns before and after them.
#pragma once

#include "elements.h"
#include "kernels.h"

namespace dspark::cuda {

inline constexpr int kSplitThreads = 256;

// Units that a thread loads before it uses the first. One split is one such batch of a block, so
// that all of a split's loads are in flight together.
inline constexpr int kBatchUnits = 4;
inline constexpr int64_t kSplitColumns = int64_t{kSplitThreads} * kBatchUnits * kUnitColumns;
inline constexpr int kMaxSplits = 2 * kWarp;

inline int split_count(int64_t columns) {
  const int64_t splits = (columns + kSplitColumns - 1) / kSplitColumns;
  return static_cast<int>(splits < 1 ? 1 : splits > kMaxSplits ? kMaxSplits : splits);
}

struct Slice {
  int64_t head;        // columns before the row's first unit
  int64_t begin, end;  // units of this block
  int64_t tail;        // first column after the row's last unit
  int64_t loose;       // columns of head and tail, where they are this block's, else 0

  __device__ int64_t column(int64_t unit) const { return head + unit * kUnitColumns; }
  __device__ int64_t loose_column(int64_t i) const { return i < head ? i : tail + (i - head); }
};

__device__ __forceinline__ Slice slice_of(const void* row, int element_size, int64_t columns) {
  const int misaligned = static_cast<int>(reinterpret_cast<uintptr_t>(row) % 16);
  int64_t head = (16 - misaligned) % 16 / element_size;
  if (head > columns) head = columns;
  const int64_t units = (columns - head) / kUnitColumns;
  Slice slice;
  slice.head = head;
  slice.begin = units * block_x() / grid_x();
  slice.end = units * (block_x() + 1) / grid_x();
  slice.tail = head + units * kUnitColumns;
  slice.loose = block_x() == 0 ? head + (columns - slice.tail) : 0;
  return slice;
}

template <class E>
__device__ __forceinline__ Slice slice_of(const E* row, int64_t columns) {
  return slice_of(row, static_cast<int>(sizeof(E)), columns);
}

// A batch of one operand: the units first, first + kSplitThreads, ...; -inf where there is none.
template <class E>
__device__ __forceinline__ void load_batch(const E* row, const Slice& slice, int64_t first,
                                           bool aligned, float (&x)[kBatchUnits][kUnitColumns]) {
#pragma unroll
  for (int k = 0; k < kBatchUnits; ++k) {
    const int64_t unit = first + k * kSplitThreads;
    if (unit < slice.end) {
      load_columns(row + slice.column(unit), aligned, x[k]);
    } else {
#pragma unroll
      for (float& value : x[k]) value = -__builtin_inff();
    }
  }
}

}  // namespace dspark::cuda
