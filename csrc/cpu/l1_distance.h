// l1_distance: per row l1 = sum |p - q| and the two sides of S = sum sign(p - q) p, 1 - S and
// 1 + S, from two rows of logits and their statistics. Reads both rows once; neither softmax is
// materialised. Over some of a row's columns the results are partial sums.
//
// l1 is a direct sum of absolute differences, since 2 - 2 sum min(p, q) loses everything where
// the distributions are close. The sides are sums of their own because the smaller one is what the
// gradient of a confident row consists of.
#pragma once

#include "log_softmax.h"

namespace dspark::cpu {
namespace {

struct Sides {
  double below_one;  // 1 - S
  double above_one;  // 1 + S
};

template <class Real>
inline void store_sides(void* all, int64_t row, const Sides& sides) {
  Real* out = static_cast<Real*>(all) + 2 * row;
  out[0] = static_cast<Real>(sides.below_one);
  out[1] = static_cast<Real>(sides.above_one);
}

template <class Real>
inline Sides load_sides(const void* all, int64_t row) {
  const Real* in = static_cast<const Real*>(all) + 2 * row;
  return {static_cast<double>(in[0]), static_cast<double>(in[1])};
}

struct Distance {
  double l1 = 0;
  double below_one = 0;  // sum (1 - s_j) p_j = 1 - S
  double above_one = 0;  // sum (1 + s_j) p_j = 1 + S

  void add(const Distance& other) {
    l1 += other.l1;
    below_one += other.below_one;
    above_one += other.above_one;
  }
  double clamped_l1() const { return l1 > 2 ? 2 : l1; }
  // NaN on either side of a comparison is neither larger nor smaller; only l1 has seen it.
  Sides sides() const { return l1 != l1 ? Sides{l1, l1} : Sides{below_one, above_one}; }
};

// `e` and `f` are the exponentials of draft and target, p = e * p_scale and q = f * q_scale.
template <class Real>
inline Distance chunk_distance(const Real* e, const Real* f, int64_t size, Real p_scale,
                               Real q_scale) {
  constexpr auto kSign = std::numeric_limits<typename SimdTraits<Real>::Int>::min();
  Vec<Real> l1_sum{}, below_sum{}, above_sum{};
  for_each_stretch(0, size, [&](int64_t begin, int64_t stretch) {
    Vec<Real> l1[2] = {}, below[2] = {}, above[2] = {};
    for (int64_t i = begin; i < begin + stretch; i += kBlock<Real>) {
      for (int u = 0; u < kUnroll; ++u) {
        Vec<Real> p, q;
        std::memcpy(&p, e + i + u * kLanes<Real>, sizeof p);
        std::memcpy(&q, f + i + u * kLanes<Real>, sizeof q);
        p *= p_scale;
        const Vec<Real> d = p - q * q_scale;
        const IntVec<Real> sign = reinterpret_cast<IntVec<Real>>(d) & kSign;
        const Vec<Real> signed_p = select<Real>(
            d != 0, reinterpret_cast<Vec<Real>>(reinterpret_cast<IntVec<Real>>(p) ^ sign));
        l1[u % 2] += abs<Real>(d);
        below[u % 2] += p - signed_p;
        above[u % 2] += p + signed_p;
      }
    }
    l1_sum += l1[0] + l1[1];
    below_sum += below[0] + below[1];
    above_sum += above[0] + above[1];
  });
  return {sum_lanes<Real>(l1_sum), sum_lanes<Real>(below_sum), sum_lanes<Real>(above_sum)};
}

template <class Real>
void l1_distance_rows(const L1DistanceArgs& args) {
  const int64_t columns = args.draft->columns();
  const Reader<Real> draft = reader_for<Real>(args.draft->dtype());
  const Reader<Real> target = reader_for<Real>(args.target->dtype());
  for_each_row_alone(
      args.draft->count(), columns, args.threads, [&](int64_t row, int thread, int team) {
        Distance total;
        if (is_active(args.active, row)) {
          const void* x = args.draft->row(row);
          const void* t = args.target->row(row);
          const RowStatistics p = load_statistics<Real>(args.draft_statistics, row);
          const RowStatistics q = load_statistics<Real>(args.target_statistics, row);
          auto* partial = reinterpret_cast<Distance*>(static_cast<char*>(args.scratch) +
                                                      thread * chunk_scratch_bytes(columns));
          for_each_chunk(
              columns, team, Order::kForward, [&](int64_t i, int64_t begin, int64_t size) {
                ChunkExponentials<Real> e, f;
                chunk_exponentials(draft, x, begin, size, static_cast<Real>(p.m), e.values);
                chunk_exponentials(target, t, begin, size, static_cast<Real>(q.m), f.values);
                partial[i] =
                    chunk_distance<Real>(e.values, f.values, size, static_cast<Real>(1 / p.z()),
                                         static_cast<Real>(1 / q.z()));
              });
          for (int64_t i = 0; i < chunk_count(columns); ++i) total.add(partial[i]);
        }
        static_cast<Real*>(args.l1)[row] = static_cast<Real>(total.clamped_l1());
        store_sides<Real>(args.sides, row, total.sides());
      });
}

}  // namespace
}  // namespace dspark::cpu
