// The interface of csrc/cuda/hardware/primitives.h for a host: kernels that include it run in the
// emulator. The last two parameters of what touches memory or waits are the caller's place, which
// the compiler fills in.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "emulator.h"

#define DSPARK_EMULATION_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace dspark::cuda {

// --- Types ---------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
struct alignas(16) Vector {
  uint32_t words[4];
};
struct MBarrier {
  uint64_t state;
};

// --- Where a thread is ---------------------------------------------------------------------------

inline int thread_index() { return emulation::current->index; }
inline int64_t block_x() { return emulation::current->block->x; }
inline int64_t block_y() { return emulation::current->block->y; }
inline int64_t grid_x() { return emulation::grid.x; }

inline int cluster_rank() { return emulation::current->block->rank; }
inline int cluster_size() { return emulation::grid.cluster_size; }
inline int cluster_index() {
  return static_cast<int>(emulation::current->block->x / emulation::grid.cluster_size);
}
inline int cluster_count() {
  return static_cast<int>(emulation::grid.x / emulation::grid.cluster_size);
}

// --- Global memory -------------------------------------------------------------------------------

template <class T>
inline T load(const T* p, DSPARK_EMULATION_PLACE) {
  static_assert(sizeof(T) <= 16, "more than one instruction loads");
  emulation::access(p, sizeof(T), alignof(T), emulation::Primitive::kLoad, {file, line});
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
inline T load_uniform(const T* p, DSPARK_EMULATION_PLACE) {
  static_assert(sizeof(T) <= 16, "more than one instruction loads");
  emulation::access_uniform(p, sizeof(T), alignof(T), {file, line});
  T value;
  std::memcpy(&value, p, sizeof(T));
  return value;
}
template <class T>
inline void store(T* p, T value, DSPARK_EMULATION_PLACE) {
  static_assert(sizeof(T) <= 16, "more than one instruction stores");
  emulation::access(p, sizeof(T), alignof(T), emulation::Primitive::kStore, {file, line});
  std::memcpy(p, &value, sizeof(T));
}
inline void store_streaming(Vector* p, Vector v, DSPARK_EMULATION_PLACE) {
  store(p, v, file, line);
}

// --- Shared memory -------------------------------------------------------------------------------

inline char* shared_memory() { return emulation::current->block->shared; }

inline uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(static_cast<const char*>(p) - emulation::current->block->shared);
}

inline void send_in_cluster(Vector* p, int rank, Vector v, MBarrier* barrier,
                            DSPARK_EMULATION_PLACE) {
  emulation::send_in_cluster(p, rank, &v, &barrier->state, {file, line});
}

// --- Warps and barriers --------------------------------------------------------------------------

inline constexpr int kWarp = 32;

template <class T>
inline T shuffle_of(emulation::Primitive primitive, T value, int operand, emulation::Place place) {
  static_assert(sizeof(T) == 4, "a shuffle moves 32 bits");
  uint32_t word;
  std::memcpy(&word, &value, 4);
  word = emulation::shuffle(word, operand, primitive, place);
  std::memcpy(&value, &word, 4);
  return value;
}
template <class T>
inline T shuffle_xor(T value, int mask, DSPARK_EMULATION_PLACE) {
  return shuffle_of(emulation::Primitive::kShuffleXor, value, mask, {file, line});
}
template <class T>
inline T shuffle_up(T value, int distance, DSPARK_EMULATION_PLACE) {
  return shuffle_of(emulation::Primitive::kShuffleUp, value, distance, {file, line});
}

inline bool all_in_warp(bool condition, DSPARK_EMULATION_PLACE) {
  int all = condition ? 1 : 0;
  for (int mask = kWarp / 2; mask > 0; mask /= 2) all &= shuffle_xor(all, mask, file, line);
  return all != 0;
}
inline void block_barrier(DSPARK_EMULATION_PLACE) { emulation::block_barrier({file, line}); }
inline void cluster_arrive(DSPARK_EMULATION_PLACE) { emulation::cluster_arrive({file, line}); }
inline void cluster_wait(DSPARK_EMULATION_PLACE) { emulation::cluster_wait({file, line}); }

// --- Asynchronous copies -------------------------------------------------------------------------

inline void mbarrier_init(MBarrier* barrier, int arrivals, DSPARK_EMULATION_PLACE) {
  emulation::mbarrier_init(&barrier->state, arrivals, {file, line});
}
inline void fence_mbarrier_init(DSPARK_EMULATION_PLACE) {
  emulation::fence_mbarrier_init({file, line});
}
inline void mbarrier_arrive_expecting(MBarrier* barrier, uint32_t bytes, DSPARK_EMULATION_PLACE) {
  emulation::mbarrier_arrive_expecting(&barrier->state, bytes, {file, line});
}
inline void mbarrier_wait(MBarrier* barrier, uint32_t parity, DSPARK_EMULATION_PLACE) {
  emulation::mbarrier_wait(&barrier->state, parity, {file, line});
}
inline void bulk_load(void* shared, const void* global, uint32_t bytes, MBarrier* barrier,
                      DSPARK_EMULATION_PLACE) {
  emulation::bulk_load(shared, global, bytes, &barrier->state, {file, line});
}

// --- Arithmetic ----------------------------------------------------------------------------------

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float exp2_approximate(float x) {
  ++emulation::counters->exponentials;
  return emulation::exp2_approximate(x);
}
inline float reciprocal_approximate(float x) { return emulation::reciprocal_approximate(x); }
inline float log1p_of(float x) { return log1pf(x); }
inline float maximum(float a, float b) {
  if (a != a) return b != b ? float_of(0x7FFFFFFFu) : b;
  if (b != b) return a;
  if (a == b) return float_of(bits_of(a) & bits_of(b));  // of two zeros the positive one
  return a > b ? a : b;
}
inline float minimum(float a, float b) { return -maximum(-a, -b); }

inline float to_float(float x) { return x; }
inline float to_float(BFloat16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t rest = x.bits & 0x7FFFu;
  if (rest >= 0x7C00u) return float_of(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
  if (rest >= 0x0400u) return float_of(sign | ((rest << 13) + ((127u - 15u) << 23)));
  return float_of(sign | bits_of(static_cast<float>(rest) * 0x1p-24f));
}

template <class E>
inline E from_float(float x);
template <>
inline float from_float<float>(float x) {
  return x;
}
template <>
inline BFloat16 from_float<BFloat16>(float x) {
  if (x != x) return {0x7FFF};
  const uint32_t bits = bits_of(x);
  return {static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16)};
}
template <>
inline Half from_float<Half>(float x) {
  if (x != x) return {0x7FFF};
  const uint32_t sign = bits_of(x) >> 16 & 0x8000u;
  const uint32_t rest = bits_of(x) & 0x7FFFFFFFu;
  uint32_t half;
  if (rest >= 0x477FF000u) {  // 65520 and up
    half = 0x7C00u;
  } else if (rest >= 0x38800000u) {  // normal in half precision
    half = (rest + 0xFFFu + (rest >> 13 & 1u) - ((127u - 15u) << 23)) >> 13;
  } else {
    // In [2^23, 2^24) the last place of a float is 1: the addition rounds to whole multiples of
    // the smallest subnormal, to even.
    half = bits_of(float_of(rest) * 0x1p24f + 0x1p23f) & 0x7FFFFFu;
  }
  return {static_cast<uint16_t>(sign | half)};
}

template <class E>
inline uint32_t pack(float low, float high) {
  static_assert(sizeof(E) == 2, "two elements to a word");
  return from_float<E>(low).bits | static_cast<uint32_t>(from_float<E>(high).bits) << 16;
}

// `infinity` has the format's exponent bits.
inline uint16_t maximum_of_bits(uint16_t a, uint16_t b, uint16_t infinity) {
  const bool a_is_nan = (a & 0x7FFF) > infinity, b_is_nan = (b & 0x7FFF) > infinity;
  if (a_is_nan && b_is_nan) return 0x7FFF;
  if (a_is_nan) return b;
  if (b_is_nan) return a;
  // Ordered as integers: negative numbers reversed, below the others.
  const auto order = [](uint16_t x) {
    return static_cast<uint16_t>((x & 0x8000) != 0 ? ~x : x | 0x8000);
  };
  return order(a) >= order(b) ? a : b;
}
template <class E>
inline uint32_t maximum_of_pairs(uint32_t a, uint32_t b);
template <>
inline uint32_t maximum_of_pairs<BFloat16>(uint32_t a, uint32_t b) {
  const auto half = [&](int shift) {
    return static_cast<uint32_t>(maximum_of_bits(static_cast<uint16_t>(a >> shift),
                                                 static_cast<uint16_t>(b >> shift), 0x7F80))
           << shift;
  };
  return half(0) | half(16);
}
template <>
inline uint32_t maximum_of_pairs<Half>(uint32_t a, uint32_t b) {
  const auto half = [&](int shift) {
    return static_cast<uint32_t>(maximum_of_bits(static_cast<uint16_t>(a >> shift),
                                                 static_cast<uint16_t>(b >> shift), 0x7C00))
           << shift;
  };
  return half(0) | half(16);
}

}  // namespace dspark::cuda
