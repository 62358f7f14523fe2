// What is known of a row of logits, or of some of its columns, and how parts of it combine.
//
// Exponentials are 2^((x - m) log2(e)) with the difference taken first: a large offset common to
// a row cancels before anything is rounded.
#pragma once

#include <primitives.h>

namespace dspark::cuda {

inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr int64_t kIgnoreIndex = -100;
// A label whose column another rank holds.
inline constexpr int64_t kElsewhere = INT64_MIN;
inline constexpr float kInfinity = __builtin_inff();
inline constexpr float kNaN = __builtin_nanf("");

// exp(x - m), x <= m.
__device__ __forceinline__ float exponential(float x, float m) {
  return exp2_approximate((x - m) * kLog2E);
}

// What to subtract from logits that are all -inf; their exponentials are 0 then.
__device__ __forceinline__ float shift(float m) { return m == -kInfinity ? 0.f : m; }

// 1 / z. The hardware's approximation and one step of Newton's method: a division proper is a
// function call, for which a kernel has to put its registers aside.
__device__ __forceinline__ float reciprocal(float z) {
  const float r = reciprocal_approximate(z);
  return fmaf(r, fmaf(-z, r, 1.f), r);
}

// Maximum, how many columns equal it, and the sum of exp(x_j - m) over the others.
struct Statistics {
  float m, c, t;

  // As in PyTorch, a row without a finite logit, or with +inf, has no distribution: m - m makes it
  // NaN. Decided here and not in t, since a part of nothing but -inf may belong to a row that has
  // a distribution.
  __device__ float z() const { return m - m + c + t; }
  __device__ float log_z() const { return log1p_of(m - m + (c - 1.f) + t); }
};

__device__ __forceinline__ Statistics no_columns() { return {-kInfinity, 0.f, 0.f}; }

__device__ __forceinline__ Statistics combine(const Statistics& a, const Statistics& b) {
  const float m = maximum(a.m, b.m);
  // A part whose maximum is lower counts whole among the others.
  const bool a_holds = a.m == m, b_holds = b.m == m;
  const float a_others = a_holds ? a.t : (a.c + a.t) * exponential(a.m, m);
  const float b_others = b_holds ? b.t : (b.c + b.t) * exponential(b.m, m);
  return {m, (a_holds ? a.c : 0.f) + (b_holds ? b.c : 0.f), a_others + b_others};
}

// Of p and q over some columns: l1 = sum |p - q|, and p summed by the sign of p - q.
struct Distance {
  float l1;
  float above;  // p > q
  float rest;   // the others, ties among them
  float tie;    // p = q

  // `d` is p - q; ties are for the caller to note.
  __device__ void add(float p, float d) {
    l1 += fabsf(d);
    if (d > 0.f) {
      above += p;
    } else {
      rest += p;
    }
  }
};

__device__ __forceinline__ Distance combine(const Distance& a, const Distance& b) {
  return {a.l1 + b.l1, a.above + b.above, a.rest + b.rest, a.tie + b.tie};
}

// S = sum sign(p - q) p as its two sides. The smaller one is what the gradient of a confident row
// consists of, and subtracting a rounded S from 1 would leave none of its digits.
struct Sides {
  float below_one;  // 1 - S
  float above_one;  // 1 + S
};

// Only l1 is sure to have seen a NaN: it is neither above nor below anything.
__device__ __forceinline__ Sides sides_of(const Distance& distance) {
  if (distance.l1 != distance.l1) return {kNaN, kNaN};
  return {2.f * distance.rest - distance.tie, 2.f * distance.above + distance.tie};
}

__device__ __forceinline__ float clamped_l1(const Distance& distance) {
  return distance.l1 > 2.f ? 2.f : distance.l1;
}

__device__ __forceinline__ bool is_column(int64_t id, int64_t columns) {
  return id >= 0 && id < columns;
}

// log(Z) - (x_y - m): a large common offset cancels before any rounding.
__device__ __forceinline__ float cross_entropy(float label_logit, const Statistics& draft) {
  return draft.log_z() - (label_logit - draft.m);
}

// The gradient a (p - onehot) + b p (s - S) of a row, one factor of p for each sign s.
struct Slopes {
  float a, b;
  Sides sides;
  float above, tie, below;

  __device__ Slopes(float a, float b, const Sides& sides) : a(a), b(b), sides(sides) {
    above = of(sides.below_one);
    tie = of(0.5f * (sides.below_one - sides.above_one));
    below = of(-sides.above_one);
  }

  // A teacher that is only reported on (b = 0) must not reach the gradient, not even as NaN.
  __device__ float of(float side) const { return b == 0.f ? a : a + b * side; }

  // `d` is p - q; 0 without a target.
  __device__ float gradient(float p, float d) const {
    return p * (d > 0.f ? above : d < 0.f ? below : tie);
  }

  // The label's element: where it is a maximum, p - 1 is formed from the other columns' sum, since
  // subtracting 1 from a rounded p leaves noise.
  __device__ float label_gradient(float p, float d, bool is_maximum,
                                  const Statistics& draft) const {
    const float p_minus_one =
        is_maximum ? -(draft.c - 1.f + draft.t) * reciprocal(draft.z()) : p - 1.f;
    const float side = d > 0.f   ? sides.below_one
                       : d < 0.f ? -sides.above_one
                                 : 0.5f * (sides.below_one - sides.above_one);
    return a * p_minus_one + (b == 0.f ? 0.f : b * p * side);
  }
};

}  // namespace dspark::cuda
