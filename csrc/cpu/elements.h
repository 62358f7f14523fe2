// The four element types of logits in memory, and their way into and out of vectors. This is
// the one place where a dtype code becomes a type.
#pragma once

#include "../rows.h"
#include "simd.h"

namespace dspark::cpu {
namespace {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float half_to_float(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t exponent = (half >> 10) & 0x1fu;
  const uint32_t mantissa = half & 0x3ffu;
  if (exponent == 0) {  // zero and subnormals: an integer multiple of 2^-24
    return float_of(bits_of(static_cast<float>(mantissa) * 5.9604644775390625e-8f) | sign);
  }
  if (exponent == 31) return float_of(sign | 0x7f800000u | (mantissa << 13));
  return float_of(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

// Round to nearest, ties to even.
inline uint16_t float_to_half(float x) {
  const uint32_t bits = bits_of(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds past 65504
  if (magnitude < 0x38800000u) {
    // Subnormal: adding 0.5 aligns the mantissa so that the hardware does the rounding.
    return sign | static_cast<uint16_t>(bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u);
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return sign | static_cast<uint16_t>((rounded - 0x38000000u) >> 13);
}

inline uint16_t float_to_bfloat16(float x) {
  const uint32_t bits = bits_of(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

template <class Real>
inline Real to_real(float x) {
  return x;
}
template <class Real>
inline Real to_real(double x) {
  return static_cast<Real>(x);
}
template <class Real>
inline Real to_real(BFloat16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}
template <class Real>
inline Real to_real(Half x) {
  return half_to_float(x.bits);
}

template <class E>
inline E from_real(double x);
template <>
inline float from_real<float>(double x) {
  return static_cast<float>(x);
}
template <>
inline double from_real<double>(double x) {
  return x;
}
template <>
inline BFloat16 from_real<BFloat16>(double x) {
  return {float_to_bfloat16(static_cast<float>(x))};
}
template <>
inline Half from_real<Half>(double x) {
  return {float_to_half(static_cast<float>(x))};
}

// As many 16-bit and 32-bit integers as a vector has floats, and twice as many 16-bit ones.
typedef uint16_t Shorts __attribute__((vector_size(kVectorBytes / 2)));
typedef uint32_t Words __attribute__((vector_size(kVectorBytes)));
typedef uint16_t ShortPair __attribute__((vector_size(kVectorBytes)));

// kLanes<Real> consecutive elements at any alignment.
template <class Real, class E>
inline Vec<Real> load(const E* p) {
  Vec<Real> v;
  if constexpr (sizeof(E) == sizeof(Real)) {
    std::memcpy(&v, p, sizeof v);
  } else if constexpr (sizeof(Real) == 8) {
    for (int i = 0; i < kLanes<double>; ++i) v[i] = to_real<double>(p[i]);
  } else {
    Shorts raw;
    std::memcpy(&raw, p, sizeof raw);
    if constexpr (__is_same(E, BFloat16)) {
#if defined(__AVX2__)
      const Words wide =
          reinterpret_cast<Words>(_mm256_cvtepu16_epi32(reinterpret_cast<__m128i>(raw)));
#else
      const Words wide = __builtin_convertvector(raw, Words);
#endif
      v = reinterpret_cast<Vec<float>>(wide << 16);
    } else {
#if defined(__F16C__)
      v = reinterpret_cast<Vec<float>>(_mm256_cvtph_ps(reinterpret_cast<__m128i>(raw)));
#else
      for (int i = 0; i < kLanes<float>; ++i) v[i] = half_to_float(raw[i]);
#endif
    }
  }
  return v;
}

// Two vectors of floats to 16 bits, rounded to nearest even.
//
// bfloat16 without the usual test for NaN: adding the rounding increment to a NaN keeps it one
// unless its low mantissa bits are set, and here those are zero, since a NaN in a bfloat16
// gradient comes from bfloat16 logits or is made canonical (see Slopes).
template <class E>
inline ShortPair to_shorts(Vec<float> a, Vec<float> b) {
  if constexpr (__is_same(E, BFloat16)) {
    auto round = [](Vec<float> v) {
      const Words bits = reinterpret_cast<Words>(v);
      return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    };
    const Words low = round(a), high = round(b);
#if defined(__AVX2__)
    const __m256i packed =
        _mm256_packus_epi32(reinterpret_cast<__m256i>(low), reinterpret_cast<__m256i>(high));
    return reinterpret_cast<ShortPair>(_mm256_permute4x64_epi64(packed, _MM_SHUFFLE(3, 1, 2, 0)));
#else
    const Shorts halves[2] = {__builtin_convertvector(low, Shorts),
                              __builtin_convertvector(high, Shorts)};
    ShortPair result;
    std::memcpy(&result, halves, sizeof result);
    return result;
#endif
  } else {
    ShortPair result;
#if defined(__F16C__)
    const __m128i halves[2] = {_mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT),
                               _mm256_cvtps_ph(b, _MM_FROUND_TO_NEAREST_INT)};
    std::memcpy(&result, halves, sizeof result);
#else
    for (int i = 0; i < kLanes<float>; ++i) {
      result[i] = float_to_half(a[i]);
      result[i + kLanes<float>] = float_to_half(b[i]);
    }
#endif
    return result;
  }
}

// One block of results into the element type, at any address.
template <class E, class Real>
inline void store_block(const Vec<Real> (&v)[kUnroll], E* out) {
  static_assert(sizeof(E) <= sizeof(Real));
  if constexpr (sizeof(E) == sizeof(Real)) {
    std::memcpy(out, v, sizeof v);
  } else if constexpr (sizeof(Real) == 8) {
    for (int i = 0; i < kBlock<double>; ++i) {
      out[i] = from_real<E>(v[i / kLanes<double>][i % kLanes<double>]);
    }
  } else {
    for (int u = 0; u < kUnroll; u += 2) {
      const ShortPair shorts = to_shorts<E>(v[u], v[u + 1]);
      std::memcpy(out + u * kLanes<float>, &shorts, sizeof shorts);
    }
  }
}

// Which pairs of types stream_block serves: those whose vectors convert as a whole.
template <class E, class Real>
inline constexpr bool kStreamable = sizeof(E) == sizeof(Real) || sizeof(Real) == 4;

// Stores a vector past the caches, to an address that is a multiple of its size.
template <class V>
inline void stream(void* out, V v) {
  static_assert(sizeof v == kVectorBytes);
#if defined(__AVX__)
  _mm256_stream_si256(static_cast<__m256i*>(out), reinterpret_cast<__m256i>(v));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(out), reinterpret_cast<__m128i>(v));
#else
  std::memcpy(out, &v, sizeof v);
#endif
}

template <class E, class Real>
inline void stream_block(const Vec<Real> (&v)[kUnroll], E* out) {
  if constexpr (sizeof(E) == sizeof(Real)) {
    for (int u = 0; u < kUnroll; ++u) stream(out + u * kLanes<Real>, v[u]);
  } else {
    for (int u = 0; u < kUnroll; u += 2)
      stream(out + u * kLanes<float>, to_shorts<E>(v[u], v[u + 1]));
  }
}

// Calls f with a null pointer of the element type that a dtype code stands for.
template <class F>
inline void with_element_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return f(static_cast<BFloat16*>(nullptr));
    case DType::kFloat16:
      return f(static_cast<Half*>(nullptr));
    case DType::kFloat64:
      return f(static_cast<double*>(nullptr));
  }
}

}  // namespace
}  // namespace dspark::cpu
