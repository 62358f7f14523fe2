// gradient: per row a * (p - onehot(y)) + b * p * (s - S) with respect to the draft logits, from
// the rows, their statistics and the two coefficients. Every element is formed in Real, rounded
// once and written once; neither softmax is materialised.
#pragma once

#include "l1_distance.h"

namespace dspark::cpu {
namespace {

// Past this size a gradient is not in any cache by the time backward reads it, so its stores
// bypass the caches and spare the read of the line they overwrite.
inline constexpr int64_t kStreamedBytes = int64_t{8} << 20;

// a + b (s - S) for s = 1, 0, -1.
template <class Real>
struct Slopes {
  Real above, tie, below;

  Slopes(double a, double b, const Sides& sides) {
    // A teacher that is only reported on (b = 0) must not reach the gradient, not even as NaN.
    above = canonical(b == 0 ? a : a + b * sides.below_one);
    tie = canonical(b == 0 ? a : a + b * (sides.below_one - sides.above_one) / 2);
    below = canonical(b == 0 ? a : a - b * sides.above_one);
  }

  static Real canonical(double x) {
    return x != x ? std::numeric_limits<Real>::quiet_NaN() : static_cast<Real>(x);
  }
};

// Writes `size` elements to out; produce(i, v) computes the block of results that begins at
// column i. A streamed store needs an aligned address, so the blocks begin where `out` is
// aligned; results are elementwise and do not notice.
//
// The last block ends with the chunk, and overlaps the one before: what another thread does to the
// next chunk at the same time is not to be looked at. Only a chunk shorter than a block is produced
// with what stands behind it, which is its own padding.
template <class E, class Real, class F>
inline void write_chunk(E* out, int64_t size, bool streamed, F&& produce) {
  Vec<Real> v[kUnroll];
  alignas(64) E block[kBlock<Real>];
  int64_t i = 0;
  if constexpr (kStreamable<E, Real>) {
    if (streamed) {
      const auto misalignment = reinterpret_cast<uintptr_t>(out) % kVectorBytes;
      const int64_t head =
          static_cast<int64_t>((kVectorBytes - misalignment) % kVectorBytes / sizeof(E));
      if (head > 0) {
        produce(i, v);
        store_block<E, Real>(v, block);
        i = head < size ? head : size;
        std::memcpy(out, block, static_cast<size_t>(i) * sizeof(E));
      }
      for (; i + kBlock<Real> <= size; i += kBlock<Real>) {
        produce(i, v);
        stream_block<E, Real>(v, out + i);
      }
    }
  }
  for (; i + kBlock<Real> <= size; i += kBlock<Real>) {
    produce(i, v);
    store_block<E, Real>(v, out + i);
  }
  if (i < size) {
    const int64_t first = size < kBlock<Real> ? 0 : size - kBlock<Real>;
    produce(first, v);
    store_block<E, Real>(v, block);
    std::memcpy(out + i, block + (i - first), static_cast<size_t>(size - i) * sizeof(E));
  }
}

// Streamed stores are weakly ordered; nothing may read or overwrite them before this.
inline void finish_streaming([[maybe_unused]] bool streamed) {
#if defined(__SSE2__)
  if (streamed) _mm_sfence();
#endif
}

// Gradient of one chunk from exponentials. `f` null: no target, the slope is `tie` throughout.
// A chunk shorter than a block is read as a whole block.
template <class Real, class E>
void write_gradient(void* row, int64_t begin, int64_t size, const Real* e, const Real* f,
                    Real p_scale, Real q_scale, const Slopes<Real>& slopes, bool streamed) {
  E* out = static_cast<E*>(row) + begin;
  if (f == nullptr) {
    const Real scale = p_scale;
    write_chunk<E, Real>(out, size, streamed, [&](int64_t i, Vec<Real>(&v)[kUnroll]) {
      for (int u = 0; u < kUnroll; ++u) {
        std::memcpy(&v[u], e + i + u * kLanes<Real>, sizeof v[u]);
        v[u] = v[u] * scale * slopes.tie;
      }
    });
    return;
  }
  const Vec<Real> above = broadcast(slopes.above), below = broadcast(slopes.below),
                  tie = broadcast(slopes.tie);
  write_chunk<E, Real>(out, size, streamed, [&](int64_t i, Vec<Real>(&v)[kUnroll]) {
    for (int u = 0; u < kUnroll; ++u) {
      Vec<Real> p, q;
      std::memcpy(&p, e + i + u * kLanes<Real>, sizeof p);
      std::memcpy(&q, f + i + u * kLanes<Real>, sizeof q);
      p *= p_scale;
      q *= q_scale;
      v[u] = p * select<Real>(p > q, above, select<Real>(p < q, below, tie));
    }
  });
}

template <class E>
void write_zeros(void* row, int64_t columns, bool streamed) {
  using Real = std::conditional_t<sizeof(E) == 8, double, float>;
  write_chunk<E, Real>(static_cast<E*>(row), columns, streamed,
                       [](int64_t, Vec<Real>(&v)[kUnroll]) {
                         for (auto& x : v) x = Vec<Real>{};
                       });
}

template <class E>
void write_element(void* row, int64_t column, double value) {
  static_cast<E*>(row)[column] = from_real<E>(value);
}

template <class Real>
struct Writer {
  void (*gradient)(void* row, int64_t begin, int64_t size, const Real* e, const Real* f,
                   Real p_scale, Real q_scale, const Slopes<Real>& slopes, bool streamed);
  void (*zeros)(void* row, int64_t columns, bool streamed);
  void (*element)(void* row, int64_t column, double value);
};

template <class Real>
inline Writer<Real> writer_for(DType dtype) {
  Writer<Real> writer{};
  with_element_type(dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(E) <= sizeof(Real)) {
      writer = {write_gradient<Real, E>, write_zeros<E>, write_element<E>};
    }
  });
  return writer;
}

inline bool is_streamed(const Rows& gradient) {
  return gradient.count() * gradient.columns() * element_size(gradient.dtype()) >= kStreamedBytes;
}

// The label's element, a (p_y - 1) + b p_y (s_y - S), in double throughout: in a confident row
// both parts are tiny differences from 1. Where the label is a maximum, p_y - 1 is formed from
// the other columns' sum, since subtracting 1 from a rounded p_y leaves noise.
template <class Real>
inline double label_gradient(double label_logit, Real p, Real q, double a, double b,
                             const Sides& sides, const RowStatistics& draft) {
  const double p_y = static_cast<double>(p);
  const double p_minus_one =
      label_logit == draft.m ? -(draft.c - 1 + draft.t) / draft.z() : p_y - 1;
  const double slope = p > q   ? sides.below_one
                       : p < q ? -sides.above_one
                               : (sides.below_one - sides.above_one) / 2;
  return a * p_minus_one + (b == 0 ? 0 : b * p_y * slope);
}

// A row's `a` or `b`; 0 where the caller has none.
template <class Real>
inline double coefficient(const void* values, int64_t row) {
  return values == nullptr ? 0 : static_cast<double>(static_cast<const Real*>(values)[row]);
}

template <class Real>
void gradient_rows(const GradientArgs& args) {
  const int64_t columns = args.draft->columns();
  const Reader<Real> draft = reader_for<Real>(args.draft->dtype());
  const Reader<Real> target =
      args.target != nullptr ? reader_for<Real>(args.target->dtype()) : Reader<Real>{};
  const Writer<Real> writer = writer_for<Real>(args.gradient->dtype());
  const bool streamed = is_streamed(*args.gradient);
  for_each_row_alone(args.draft->count(), columns, args.threads, [&](int64_t row, int, int team) {
    void* out = args.gradient->row(row);
    const double b = args.target == nullptr ? 0 : coefficient<Real>(args.l1_coefficient, row);
    const int64_t id = args.ids == nullptr ? kIgnoreIndex : args.ids[row];
    const double a = id == kIgnoreIndex ? 0 : coefficient<Real>(args.ce_coefficient, row);
    if (!is_active(args.active, row)) {
      writer.zeros(out, columns, streamed);
    } else {
      const void* x = args.draft->row(row);
      const void* t = args.target != nullptr ? args.target->row(row) : nullptr;
      const RowStatistics p = load_statistics<Real>(args.draft_statistics, row);
      const RowStatistics q =
          t != nullptr ? load_statistics<Real>(args.target_statistics, row) : RowStatistics{};
      const Sides sides = t != nullptr ? load_sides<Real>(args.sides, row) : Sides{};
      const Slopes<Real> slopes(a, b, sides);
      const Real p_scale = static_cast<Real>(1 / p.z());
      const Real q_scale = t != nullptr ? static_cast<Real>(1 / q.z()) : Real(0);
      for_each_chunk(columns, team, Order::kForward, [&](int64_t, int64_t begin, int64_t size) {
        ChunkExponentials<Real> e, f;
        chunk_exponentials(draft, x, begin, size, static_cast<Real>(p.m), e.values);
        if (t != nullptr)
          chunk_exponentials(target, t, begin, size, static_cast<Real>(q.m), f.values);
        writer.gradient(out, begin, size, e.values, t != nullptr ? f.values : nullptr, p_scale,
                        q_scale, slopes, streamed);
        if (id >= begin && id < begin + size) {
          finish_streaming(streamed);
          const Real p_y = e.values[id - begin] * p_scale;
          const Real q_y = t != nullptr ? f.values[id - begin] * q_scale : p_y;
          const double label_logit = static_cast<double>(draft.at(x, id));
          writer.element(out, id, label_gradient<Real>(label_logit, p_y, q_y, a, b, sides, p));
        }
      });
    }
    finish_streaming(streamed);
  });
}

}  // namespace
}  // namespace dspark::cpu
