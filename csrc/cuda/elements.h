// Logits in global memory: where a row begins, and eight columns of it as floats and back.
#pragma once

#include <primitives.h>

#include "../rows.h"

namespace dspark::cuda {

// Columns that a thread takes at once: one 128-bit load of 16-bit logits, two of 32-bit ones.
inline constexpr int kUnitColumns = 8;

template <class E>
__device__ __forceinline__ E* row_of(const RowLayout& layout, int64_t row) {
  auto index = static_cast<uint32_t>(row);
  // Element offsets of one tensor pass 2^31 in ordinary use, hence 64 bits.
  int64_t offset = 0;
#pragma unroll
  for (int i = RowLayout::kMaxDimensions - 1; i >= 0; --i) {
    if (i >= layout.dimensions) continue;
    const uint32_t next = i > 0 ? index / layout.sizes[i] : 0;
    offset += (index - next * layout.sizes[i]) * layout.strides[i];
    index = next;
  }
  return reinterpret_cast<E*>(layout.data + static_cast<uintptr_t>(offset));
}

template <class E>
inline constexpr int kUnitVectors = kUnitColumns * sizeof(E) / sizeof(Vector);

// A unit as it lies in memory.
template <class E>
struct Unit {
  Vector vectors[kUnitVectors<E>];
};

template <class E>
__device__ __forceinline__ void to_floats(const Unit<E>& unit, float (&x)[kUnitColumns]) {
#pragma unroll
  for (int i = 0; i < kUnitColumns; ++i) {
    constexpr int kPerWord = 4 / sizeof(E);
    const uint32_t word = unit.vectors[i / (4 * kPerWord)].words[i / kPerWord % 4];
    if constexpr (sizeof(E) == 4) {
      x[i] = float_of(word);
    } else {
      x[i] = to_float(E{static_cast<uint16_t>(i % 2 == 0 ? word : word >> 16)});
    }
  }
}

template <class E>
__device__ __forceinline__ Unit<E> from_floats(const float (&x)[kUnitColumns]) {
  Unit<E> unit;
#pragma unroll
  for (int i = 0; i < kUnitColumns; i += 4 / static_cast<int>(sizeof(E))) {
    constexpr int kPerWord = 4 / sizeof(E);
    uint32_t& word = unit.vectors[i / (4 * kPerWord)].words[i / kPerWord % 4];
    if constexpr (sizeof(E) == 4) {
      word = bits_of(x[i]);
    } else {
      word = pack<E>(x[i], x[i + 1]);
    }
  }
  return unit;
}

// Eight columns from p. A row that does not lie on a 16-byte boundary where the others do is read
// one element at a time.
template <class E>
__device__ __forceinline__ void load_columns(const E* p, bool aligned, float (&x)[kUnitColumns]) {
  if (aligned) {
    Unit<E> unit;
#pragma unroll
    for (int i = 0; i < kUnitVectors<E>; ++i) {
      unit.vectors[i] = load(reinterpret_cast<const Vector*>(p) + i);
    }
    to_floats(unit, x);
  } else {
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) x[i] = to_float(load(p + i));
  }
}

template <class E>
__device__ __forceinline__ void store_columns(E* p, bool aligned, const float (&x)[kUnitColumns]) {
  if (aligned) {
    const Unit<E> unit = from_floats<E>(x);
#pragma unroll
    for (int i = 0; i < kUnitVectors<E>; ++i) {
      store_streaming(reinterpret_cast<Vector*>(p) + i, unit.vectors[i]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) store(p + i, from_float<E>(x[i]));
  }
}

__device__ __forceinline__ bool is_aligned(const void* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Vector) == 0;
}

}  // namespace dspark::cuda
