// Vectors by the compiler's vector extension, of the width the instruction set has (wider ones
// would compile, but comparisons on them become scalar code). Compiled once per level (see
// level.cpp); the few operations the extension expresses badly use intrinsics.
//
// Contraction is off (CMakeLists.txt): a product is fused with a sum exactly where fma() is
// written, so a result never depends on what the compiler felt like in one copy of a loop.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace dspark::cpu {
namespace {

#if defined(__AVX__)
inline constexpr int kVectorBytes = 32;
#else
inline constexpr int kVectorBytes = 16;
#endif

template <class Real>
struct SimdTraits;

template <>
struct SimdTraits<float> {
  using Int = int32_t;
  typedef float V __attribute__((vector_size(kVectorBytes)));
  typedef int32_t I __attribute__((vector_size(kVectorBytes)));
};

template <>
struct SimdTraits<double> {
  using Int = int64_t;
  typedef double V __attribute__((vector_size(kVectorBytes)));
  typedef int64_t I __attribute__((vector_size(kVectorBytes)));
};

template <class Real>
using Vec = typename SimdTraits<Real>::V;
template <class Real>
using IntVec = typename SimdTraits<Real>::I;
template <class Real>
inline constexpr int kLanes = kVectorBytes / sizeof(Real);

// Columns that the loops take per iteration: four vectors, enough independent work to cover the
// latency of the exponential.
inline constexpr int kUnroll = 4;
template <class Real>
inline constexpr int kBlock = kUnroll * kLanes<Real>;

template <class Real>
inline Vec<Real> broadcast(Real x) {
  return Vec<Real>{} + x;
}

inline Vec<float> fma(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__FMA__)
  return reinterpret_cast<Vec<float>>(_mm256_fmadd_ps(a, b, c));
#else
  return a * b + c;
#endif
}

// The larger of two, and `b` where `a` is NaN.
template <class Real>
inline Vec<Real> max(Vec<Real> a, Vec<Real> b) {
#if defined(__AVX__)
  if constexpr (sizeof(Real) == 4) {
    return reinterpret_cast<Vec<Real>>(_mm256_max_ps(a, b));
  } else {
    return reinterpret_cast<Vec<Real>>(_mm256_max_pd(a, b));
  }
#else
  return a > b ? a : b;
#endif
}

// `x` where the mask is set, 0 elsewhere.
template <class Real>
inline Vec<Real> select(IntVec<Real> mask, Vec<Real> x) {
  return reinterpret_cast<Vec<Real>>(reinterpret_cast<IntVec<Real>>(x) & mask);
}

template <class Real>
inline Vec<Real> select(IntVec<Real> mask, Vec<Real> x, Vec<Real> otherwise) {
#if defined(__AVX__)
  if constexpr (sizeof(Real) == 4) {
    return reinterpret_cast<Vec<Real>>(
        _mm256_blendv_ps(otherwise, x, reinterpret_cast<__m256>(mask)));
  } else {
    return reinterpret_cast<Vec<Real>>(
        _mm256_blendv_pd(otherwise, x, reinterpret_cast<__m256d>(mask)));
  }
#else
  return mask ? x : otherwise;
#endif
}

template <class Real>
inline Vec<Real> abs(Vec<Real> x) {
  using Int = typename SimdTraits<Real>::Int;
  return select<Real>(IntVec<Real>{} + std::numeric_limits<Int>::max(), x);
}

// Lanes are added in pairs in double, in an order that does not depend on the level.
template <class Real>
inline double sum_lanes(Vec<Real> x) {
  double total = 0;
  for (int i = 0; i < kLanes<Real> / 2; ++i) {
    total += static_cast<double>(x[i]) + static_cast<double>(x[i + kLanes<Real> / 2]);
  }
  return total;
}

template <class Real>
inline Real max_lanes(Vec<Real> x) {
  Real result = x[0];
  for (int i = 1; i < kLanes<Real>; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// exp(x) for x <= 0, error at most 1.3 ulp (measured by the tests); 0 below -87.7, where the
// result would be subnormal; NaN stays NaN.
//
// x = n ln2 + r with |r| <= ln2/2. Adding kMagic rounds x/ln2 to an integer and leaves n + 127
// in the low mantissa bits, so that one shift makes 2^n; the clamp puts n at -127, whose 2^n is
// the bit pattern of zero. ln2 is split so that n * kLn2High is exact without fma. The
// polynomial is the degree-6 minimax of relative error (3.1e-9) with 1 + r fixed, evaluated in
// pairs: the processor's window holds few vectors, so a shorter chain of dependent operations is
// worth more than the last fraction of an ulp.
inline Vec<float> exponential(Vec<float> x) {
  constexpr float kFlush = -88.0f;
  constexpr float kLog2E = 1.44269504f;
  constexpr float kMagic = 12582912.0f + 127.0f;
  constexpr float kLn2High = 0.693359375f;
  constexpr float kLn2Low = -2.12194440e-4f;
  x = max<float>(broadcast(kFlush), x);
  const Vec<float> shifted = fma(x, broadcast(kLog2E), broadcast(kMagic));
  const Vec<float> n = shifted - kMagic;
  Vec<float> r = fma(n, broadcast(-kLn2High), x);
  r = fma(n, broadcast(-kLn2Low), r);
  const Vec<float> r2 = r * r;
  const Vec<float> low = fma(r, broadcast(0.16666520399f), broadcast(0.499999934321f));
  Vec<float> high = fma(r, broadcast(0.00836874510894f), broadcast(0.0416683907835f));
  high = fma(r2, broadcast(0.00138145401768f), high);
  const Vec<float> p = fma(fma(high, r2, low), r2, r + 1.0f);
  const IntVec<float> power = reinterpret_cast<IntVec<float>>(shifted) << 23;
  return p * reinterpret_cast<Vec<float>>(power);
}

inline Vec<double> exponential(Vec<double> x) {
  Vec<double> y{};
  for (int i = 0; i < kLanes<double>; ++i) y[i] = ::exp(x[i]);
  return y;
}

}  // namespace
}  // namespace dspark::cpu
