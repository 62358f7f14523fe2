// What threads know of a row, combined over warps and blocks in an order that is always the same.
#pragma once

#include <primitives.h>

#include <cstring>

namespace dspark::cuda {

// A structure of 32-bit members from the lane whose index differs in `mask`.
template <class T>
__device__ __forceinline__ T from_lane(T value, int mask) {
  float words[sizeof(T) / 4];
  memcpy(words, &value, sizeof(T));
#pragma unroll
  for (float& word : words) word = shuffle_xor(word, mask);
  memcpy(&value, words, sizeof(T));
  return value;
}

// In every lane, since combine(a, b) equals combine(b, a) to the bit.
template <class T, class F>
__device__ __forceinline__ T reduce_warp(T value, F combine) {
#pragma unroll
  for (int mask = kWarp / 2; mask > 0; mask /= 2) value = combine(value, from_lane(value, mask));
  return value;
}

// In every thread of the block's first warp. `slots` lies in shared memory, one for each warp.
template <int kThreads, class T, class F>
__device__ __forceinline__ T reduce_block(T value, T neutral, F combine, T* slots) {
  constexpr int kWarps = kThreads / kWarp;
  static_assert(kWarps <= kWarp);
  value = reduce_warp(value, combine);
  if (thread_index() % kWarp == 0) slots[thread_index() / kWarp] = value;
  block_barrier();
  if (thread_index() >= kWarp) return neutral;
  return reduce_warp(thread_index() < kWarps ? slots[thread_index()] : neutral, combine);
}

}  // namespace dspark::cuda
