// The weighted objective with both rows on chip: ce, l1, what a later backward needs, and the
// gradient, from one read of each logit. Neither softmax, nor any sum over a part of a row, ever
// reaches global memory. docs/cuda.md has the page of arithmetic behind the numbers below.
//
// A cluster of blocks shares a row pair, each block a slice of its columns. Bulk copies land a
// slice in shared memory; each thread then makes three sweeps over its columns:
//
//   A  maxima, and exponentials relative to the thread's own maximum. The draft's stay in
//      registers, so does the first part of the target's; the rest are cheaper taken again than
//      kept
//   -  exchange 1: maxima and sums over the cluster give both rows' m and Z
//   B  p and q, their distance, the signs of p - q. Each p replaces its exponential in the
//      register, negated where it is below q; bit masks keep the ties
//   -  exchange 2: l1, S's sides and T. The landing buffers are free, the next row pair is
//      requested and arrives during
//   C  the gradient, out of registers
//
// In an exchange every warp sends what it knows to every block of the cluster, and every warp of
// every block combines all of it in the same order. The sends report to a barrier of the block that
// they go to; nothing waits for the whole cluster. A slot is written again only by a warp that has
// seen the other exchange of the row complete, to which each reader of the slot contributes after
// it has read. Two blocks share a multiprocessor, so that one computes while the other waits.
#include <mutex>
#include <stdexcept>
#include <tuple>
#include <type_traits>
#include <vector>

#include "elements.h"
#include "portable.h"
#include "reduce.h"
#include "resident.h"
#include "statistics.h"

namespace dspark::cuda {
namespace {

constexpr int kThreads = 192;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 2;       // on one multiprocessor
constexpr int kMaxCluster = 16;  // what Hopper and data-centre Blackwell form at most
constexpr int kEntries = kMaxCluster * kWarps;
constexpr int kMaskBits = 32;
// What the system takes of a block's shared memory.
constexpr int kReservedBytes = 1024;

// Units of a thread at most: as many as registers hold exponentials of (104 of 168), or, of 32-bit
// logits, as shared memory has room for.
template <class E>
constexpr int kUnits = sizeof(E) == 4 ? 9 : 13;
// Units of the target whose exponentials are kept as well, as far as registers are left.
template <class E>
constexpr int kKeptUnits = sizeof(E) == 4 ? 4 : 2;

// What a warp contributes to an exchange, as it travels.
template <class T>
struct Entries {
  static_assert(sizeof(T) <= sizeof(Vector));
  Vector of[kEntries];
};

// Maxima of some columns and the sums of the exponentials relative to them, the maximum included.
struct Sums {
  float draft_m, target_m, draft_s, target_s;
};

// T of the draft row, and how many columns hold its maximum.
struct Others {
  float c, t;
};

// What the caller says of a row. `label` is its column, or one of the two reasons why there is
// none.
struct Facts {
  int row, label;
  float a, b;
};
constexpr int kIgnored = -1, kNoColumn = -2;

// The label's column in the thread that has it.
struct Label {
  float x, p, d;
};

struct Shared {
  MBarrier loaded;
  MBarrier exchanged[2];
  int active;      // rows
  Facts facts[2];  // of this row and of the next, by parity
  Label label;
  Entries<Sums> sums;
  Entries<Distance> distances;
  Entries<Others> others;
};

struct Parameters {
  RowLayout draft, target, gradient;
  int rows, columns;
  int units;  // of a block, at most
  const int64_t* ids;
  const int32_t* order;  // active rows first, then the others; their number behind. Null: all
  const float *ce_coefficient, *l1_coefficient;
  float *ce, *l1;
  Statistics *draft_statistics, *target_statistics;
  Sides* sides;
};

// Every lane has the value; lane r sends it to block r.
template <class T>
__device__ __forceinline__ void contribute(Entries<T>& entries, const T& value,
                                           MBarrier& exchanged) {
  const int rank = thread_index() % kWarp;
  if (rank >= cluster_size()) return;
  Vector v{};
  memcpy(&v, &value, sizeof(value));
  send_in_cluster(&entries.of[cluster_rank() * kWarps + thread_index() / kWarp], rank, v,
                  &exchanged);
}

// Runs f(value) for those of the cluster's contributions that are this lane's, in their order.
template <class T, class F>
__device__ __forceinline__ void for_each_entry(const Entries<T>& entries, F&& f) {
  for (int i = thread_index() % kWarp; i < cluster_size() * kWarps; i += kWarp) {
    T value;
    memcpy(&value, &entries.of[i], sizeof(value));
    f(value);
  }
}

struct Pair {
  float draft, target;
};

__device__ __forceinline__ Pair larger(const Pair& a, const Pair& b) {
  return {maximum(a.draft, b.draft), maximum(a.target, b.target)};
}
__device__ __forceinline__ Pair sum(const Pair& a, const Pair& b) {
  return {a.draft + b.draft, a.target + b.target};
}
__device__ __forceinline__ Others combine(const Others& a, const Others& b) {
  return {a.c + b.c, a.t + b.t};
}

// Sums relative to other maxima.
__device__ __forceinline__ Pair rescaled(const Sums& sums, const Pair& m) {
  return {sums.draft_s * exponential(sums.draft_m, shift(m.draft)),
          sums.target_s * exponential(sums.target_m, shift(m.target))};
}

// Two reductions, maxima first, so that a sum is rescaled once and not at each step.
__device__ __forceinline__ Sums reduce_sums(const Sums& mine) {
  const Pair m = reduce_warp(Pair{mine.draft_m, mine.target_m}, larger);
  const Pair s = reduce_warp(rescaled(mine, m), sum);
  return {m.draft, m.target, s.draft, s.target};
}

// The same over all that the cluster's warps contributed, in every lane.
__device__ __forceinline__ Sums collect_sums(const Entries<Sums>& entries) {
  Pair m{-kInfinity, -kInfinity}, s{0.f, 0.f};
  for_each_entry(entries, [&](const Sums& of) { m = larger(m, {of.draft_m, of.target_m}); });
  m = reduce_warp(m, larger);
  for_each_entry(entries, [&](const Sums& of) { s = sum(s, rescaled(of, m)); });
  s = reduce_warp(s, sum);
  return {m.draft, m.target, s.draft, s.target};
}

template <class T>
__device__ __forceinline__ T reduce_parts(const T& mine) {
  return reduce_warp(mine, [](const T& a, const T& b) { return combine(a, b); });
}

template <class T>
__device__ __forceinline__ T collect(const Entries<T>& entries) {
  T all{};
  for_each_entry(entries, [&](const T& value) { all = combine(all, value); });
  return reduce_parts(all);
}

// One operand's columns in shared memory, in units.
template <class E>
__device__ __forceinline__ Unit<E> shared_unit(const E* columns, int unit) {
  Unit<E> result;
#pragma unroll
  for (int i = 0; i < kUnitVectors<E>; ++i) {
    result.vectors[i] = reinterpret_cast<const Vector*>(columns + unit * kUnitColumns)[i];
  }
  return result;
}

// The maximum of this thread's columns, taken of two 16-bit elements at a time.
template <class E>
__device__ __forceinline__ float thread_maximum(const E* columns, int units) {
  float m = -kInfinity;
  if constexpr (sizeof(E) == 4) {
    for (int unit = thread_index(); unit < units; unit += kThreads) {
      float x[kUnitColumns];
      to_floats(shared_unit(columns, unit), x);
#pragma unroll
      for (const float value : x) m = maximum(m, value);
    }
  } else {
    const uint32_t lowest = pack<E>(-kInfinity, -kInfinity);
    Vector best{{lowest, lowest, lowest, lowest}};
    for (int unit = thread_index(); unit < units; unit += kThreads) {
      const Unit<E> next = shared_unit(columns, unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        best.words[i] = maximum_of_pairs<E>(best.words[i], next.vectors[0].words[i]);
      }
    }
    float x[kUnitColumns];
    to_floats(Unit<E>{{best}}, x);
#pragma unroll
    for (const float value : x) m = maximum(m, value);
  }
  return m;
}

// exp(x - m) for the many x of a thread whose maximum is m, up to a factor that all of them share.
//
// One fused operation and one exponential each: 2^(x log2(e) + offset) with the offset rounded, so
// that the result is relative to a number next to m. How far next to it is known exactly, and the
// factor is applied to sums. Where m is so large that its rounding could leave the factor's range,
// the difference is taken first and there is no factor.
class Exponentials {
 public:
  __device__ explicit Exponentials(float maximum)
      : fused_(all_in_warp(fabsf(shift(maximum)) <= kLargest)) {
    const float m = shift(maximum);
    anchor_ = fused_ ? -(m * kLog2E) : m;
  }

  __device__ float operator()(float x) const { return exp2_approximate(exponent(x)); }

  // Of one unit, and their sum.
  template <class E>
  __device__ float operator()(const Unit<E>& unit, float (&e)[kUnitColumns]) const {
    to_floats(unit, e);
    if (fused_) {
#pragma unroll
      for (float& value : e) value = fmaf(value, kLog2E, anchor_);
    } else {
#pragma unroll
      for (float& value : e) value = (value - anchor_) * kLog2E;
    }
#pragma unroll
    for (float& value : e) value = exp2_approximate(value);
    return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
  }

  // What turns them into exp(x - m).
  __device__ float factor(float maximum) const {
    return fused_ ? exp2_approximate(-exponent(shift(maximum))) : 1.f;
  }

 private:
  static constexpr float kLargest = 1 << 20;

  __device__ float exponent(float x) const {
    return fused_ ? fmaf(x, kLog2E, anchor_) : (x - anchor_) * kLog2E;
  }

  bool fused_;
  float anchor_;
};

// Two factors with one of them, the larger, taken out: p - q is unit * (draft * e - target * f).
// Equal factors are left as exactly 1, so that identical columns tie.
struct Balance {
  float unit, draft, target;

  __device__ Balance(float draft_scale, float target_scale)
      : unit(maximum(draft_scale, target_scale)) {
    // A number whose reciprocal would overflow is lifted first; 0 has nothing to balance.
    const float lift = unit < 0x1p-60f ? 0x1p60f : 1.f;
    const float inverse = reciprocal(unit * lift);
    draft = draft_scale == unit ? 1.f : draft_scale * lift * inverse;
    target = target_scale == unit ? 1.f : target_scale * lift * inverse;
  }
};

template <class E>
__device__ __forceinline__ void store_unit(E* columns, int unit, const Unit<E>& values) {
#pragma unroll
  for (int i = 0; i < kUnitVectors<E>; ++i) {
    store_streaming(reinterpret_cast<Vector*>(columns + unit * kUnitColumns) + i,
                    values.vectors[i]);
  }
}

template <class E, bool kGradient>
class Worker {
  static constexpr int kOwnUnits = kUnits<E>;
  static constexpr int kKept = kKeptUnits<E>;
  static constexpr int kMasks = (kOwnUnits * kUnitColumns + kMaskBits - 1) / kMaskBits;

 public:
  __device__ explicit Worker(const Parameters& parameters)
      : p_(parameters), shared_(*reinterpret_cast<Shared*>(shared_memory())) {
    const int before = cluster_rank() * p_.units;
    const int left = p_.columns / kUnitColumns - before;
    units_ = left < 0 ? 0 : left < p_.units ? left : p_.units;
    draft_ = reinterpret_cast<E*>(shared_memory() + sizeof(Shared));
    target_ = draft_ + p_.units * kUnitColumns;
  }

  __device__ void run() {
    if (thread_index() == 0) {
      mbarrier_init(&shared_.loaded, 1);
      mbarrier_init(&shared_.exchanged[0], 1);
      mbarrier_init(&shared_.exchanged[1], 1);
      fence_mbarrier_init();
      shared_.active = p_.order == nullptr ? p_.rows : load(p_.order + p_.rows);
    }
    // No block sends to another one before that has begun, nor waits at a barrier before it is one.
    cluster_arrive();
    cluster_wait();

    int i = cluster_index();
    uint32_t parity = 0;
    if (i < shared_.active && thread_index() == 0) {
      request(row_at(i));
      shared_.facts[parity] = facts_of(i);
    }
    for (; i < shared_.active; i += cluster_count()) {
      mbarrier_wait(&shared_.loaded, parity);
      compute(i, parity);
      parity ^= 1;
    }
    for (; i < p_.rows; i += cluster_count()) leave_out(load_uniform(p_.order + i));
    // After its last exchange nothing is sent to a block any more, so that each leaves by itself.
  }

 private:
  __device__ bool is_first_of_cluster() const { return cluster_rank() == 0 && thread_index() == 0; }

  // Formed where it is needed: registers are what this kernel is short of.
  __device__ int first_column() const { return cluster_rank() * p_.units * kUnitColumns; }

  // Whether a column is this thread's.
  __device__ bool has(int column) const {
    const int j = column - first_column();
    return column >= 0 && j >= 0 && j < units_ * kUnitColumns &&
           j / kUnitColumns % kThreads == thread_index();
  }

  __device__ int row_at(int i) const { return p_.order == nullptr ? i : load(p_.order + i); }

  __device__ Facts facts_of(int i) const {
    Facts facts{row_at(i), kIgnored, 0.f, 0.f};
    const int64_t id = p_.ids == nullptr ? kIgnoreIndex : load(p_.ids + facts.row);
    if (id != kIgnoreIndex) {
      facts.label = is_column(id, p_.columns) ? static_cast<int>(id) : kNoColumn;
    }
    if constexpr (kGradient) {
      facts.a = facts.label == kIgnored    ? 0.f
                : facts.label == kNoColumn ? kNaN
                                           : load(p_.ce_coefficient + facts.row);
      facts.b = load(p_.l1_coefficient + facts.row);
    }
    return facts;
  }

  // Of one thread: this block's part of both rows, to be landed.
  __device__ void request(int row) {
    const auto bytes = static_cast<uint32_t>(units_ * kUnitColumns * sizeof(E));
    mbarrier_arrive_expecting(&shared_.loaded, 2 * bytes);
    if (bytes == 0) return;
    bulk_load(draft_, row_of<const E>(p_.draft, row) + first_column(), bytes, &shared_.loaded);
    bulk_load(target_, row_of<const E>(p_.target, row) + first_column(), bytes, &shared_.loaded);
  }

  __device__ void compute(int i, uint32_t parity) {
    if (thread_index() == 0) {
      const uint32_t entries = static_cast<uint32_t>(cluster_size()) * kWarps;
      mbarrier_arrive_expecting(&shared_.exchanged[0], entries * sizeof(Vector));
      mbarrier_arrive_expecting(&shared_.exchanged[1], 2 * entries * sizeof(Vector));
    }

    // Sweep A.
    const float draft_m = thread_maximum(draft_, units_);
    const float target_m = thread_maximum(target_, units_);
    const Exponentials draft_exp(draft_m), target_exp(target_m);
    float e[kOwnUnits][kUnitColumns];
    float f[kKept][kUnitColumns];
    Sums mine{draft_m, target_m, 0.f, 0.f};
    // The kept units come last, so that few registers are taken while the others need some.
#pragma unroll
    for (int k = kOwnUnits - 1; k >= 0; --k) {
      const int unit = thread_index() + k * kThreads;
      if (unit >= units_) continue;
      mine.draft_s += draft_exp(shared_unit(draft_, unit), e[k]);
      float taken[kUnitColumns];
      mine.target_s += target_exp(shared_unit(target_, unit), k < kKept ? f[k] : taken);
    }
    const float draft_factor = draft_exp.factor(draft_m);
    const float target_factor = target_exp.factor(target_m);
    mine.draft_s *= draft_factor;
    mine.target_s *= target_factor;

    contribute(shared_.sums, reduce_sums(mine), shared_.exchanged[0]);
    mbarrier_wait(&shared_.exchanged[0], parity);
    const Facts& facts = shared_.facts[parity];
    const Sums all = collect_sums(shared_.sums);

    if (is_first_of_cluster()) {
      store(p_.target_statistics + facts.row, Statistics{all.target_m, 1.f, all.target_s - 1.f});
    }

    // From the thread's exponentials to probabilities: one factor. An infinite maximum makes NaN.
    const float draft_z = all.draft_m - all.draft_m + all.draft_s;
    const float target_z = all.target_m - all.target_m + all.target_s;
    const float shrink = exponential(draft_m, shift(all.draft_m));
    const float draft_scale = draft_factor * shrink * reciprocal(draft_z);
    const float target_scale =
        target_factor * exponential(target_m, shift(all.target_m)) * reciprocal(target_z);

    Others others{0.f, mine.draft_s * shrink};
    if (draft_m == all.draft_m) {
      others = without_maximum(e, draft_exp(draft_m));
      others.t *= draft_factor;
    }
    contribute(shared_.others, reduce_parts(others), shared_.exchanged[1]);

    // Sweep B.
    const Balance balance(draft_scale, target_scale);
    Distance distance{};  // in units of the balance, of the draft's exponentials
    uint32_t ties[kMasks] = {};
#pragma unroll
    for (int k = 0; k < kOwnUnits; ++k) {
      const int unit = thread_index() + k * kThreads;
      if (unit >= units_) break;
      float q[kUnitColumns];
      if (k < kKept) {
#pragma unroll
        for (int j = 0; j < kUnitColumns; ++j) q[j] = f[k][j];
      } else {
        target_exp(shared_unit(target_, unit), q);
      }
      Distance part{};  // of a unit: long chains of fp32 additions drift where numbers repeat
      float nearest = kInfinity;  // of p and q
#pragma unroll
      for (int j = 0; j < kUnitColumns; ++j) {
        const float d = fmaf(-q[j], balance.target, e[k][j] * balance.draft);
        part.add(e[k][j], d);
        nearest = minimum(nearest, fabsf(d));
        constexpr uint32_t kSign = 0x80000000u;
        e[k][j] = float_of(bits_of(e[k][j]) ^ (bits_of(d) & kSign));
      }
      if (nearest == 0.f) {
#pragma unroll
        for (int j = 0; j < kUnitColumns; ++j) {
          // A tie has the positive sign.
          if (fmaf(-q[j], balance.target, e[k][j] * balance.draft) != 0.f) continue;
          const int bit = k * kUnitColumns + j;
          ties[bit / kMaskBits] |= 1u << (bit % kMaskBits);
          part.tie += e[k][j];
        }
      }
      distance = combine(distance, part);
    }
    distance.l1 *= balance.unit;
    distance.above *= draft_scale;
    distance.rest *= draft_scale;
    distance.tie *= draft_scale;
    if (has(facts.label)) {
      // Formed as in the sweep, from the same numbers, so to the same bits.
      const int j = facts.label - first_column();
      const float x = to_float(draft_[j]), own = draft_exp(x);
      const float other = target_exp(to_float(target_[j]));
      shared_.label = {x, own * draft_scale, fmaf(-other, balance.target, own * balance.draft)};
    }

    contribute(shared_.distances, reduce_parts(distance), shared_.exchanged[1]);
    const int next = i + cluster_count();
    const bool requests = thread_index() == 0 && next < shared_.active;
    const int next_row = requests ? row_at(next) : 0;
    mbarrier_wait(&shared_.exchanged[1], parity);
    if (requests) request(next_row);  // the landing buffers have been read by all
    distance = collect(shared_.distances);
    others = collect(shared_.others);
    const Statistics draft{all.draft_m, others.c, others.t};
    const Sides sides = sides_of(distance);

    if (is_first_of_cluster()) {
      store(p_.l1 + facts.row, clamped_l1(distance));
      store(p_.draft_statistics + facts.row, draft);
      store(p_.sides + facts.row, sides);
      if (facts.label < 0) store(p_.ce + facts.row, facts.label == kIgnored ? 0.f : kNaN);
    }
    if (has(facts.label)) store(p_.ce + facts.row, cross_entropy(shared_.label.x, draft));
    if constexpr (kGradient) {
      const Slopes slopes(facts.a, facts.b, sides);
      E* out = row_of<E>(p_.gradient, facts.row) + first_column();
      write_gradient(out, e, ties, slopes, draft_scale);
      if (has(facts.label)) {
        const Label& at = shared_.label;
        const float g = slopes.label_gradient(at.p, at.d, at.x == draft.m, draft);
        store(out + (facts.label - first_column()), from_float<E>(g));
      }
    }
    // By the last warp, which has the fewest columns and time to wait for memory.
    if (thread_index() == kThreads - kWarp && next < shared_.active) {
      shared_.facts[parity ^ 1] = facts_of(next);
    }
  }

  // T of the thread that holds the row's maximum, whose exponential is `top`: what is equal to it
  // to the last bit counts as maximum.
  __device__ Others without_maximum(const float (&e)[kOwnUnits][kUnitColumns], float top) const {
    Others result{0.f, 0.f};
#pragma unroll
    for (int k = 0; k < kOwnUnits; ++k) {
      if (thread_index() + k * kThreads >= units_) break;
      Others part{0.f, 0.f};
#pragma unroll
      for (const float value : e[k]) {
        if (value == top) {
          part.c += 1.f;
        } else {
          part.t += value;
        }
      }
      result = combine(result, part);
    }
    return result;
  }

  // Sweep C.
  __device__ void write_gradient(E* out, float (&e)[kOwnUnits][kUnitColumns],
                                 const uint32_t (&ties)[kMasks], const Slopes& slopes,
                                 float scale) const {
    const float above = slopes.above * scale, tie = slopes.tie * scale,
                below = slopes.below * scale;
#pragma unroll
    for (int k = 0; k < kOwnUnits; ++k) {
      const int unit = thread_index() + k * kThreads;
      if (unit >= units_) break;
      const uint32_t tied =
          (ties[k * kUnitColumns / kMaskBits] >> (k * kUnitColumns % kMaskBits)) & 0xffu;
      float g[kUnitColumns];
#pragma unroll
      for (int j = 0; j < kUnitColumns; ++j) {
        g[j] = fabsf(e[k][j]) * (e[k][j] < 0.f ? below : above);
      }
      if (tied != 0) {
#pragma unroll
        for (int j = 0; j < kUnitColumns; ++j) {
          if ((tied >> j & 1u) != 0) g[j] = fabsf(e[k][j]) * tie;
        }
      }
      store_unit(out, unit, from_floats<E>(g));
    }
  }

  // An inactive row: nothing of it is read, everything of it is 0.
  __device__ void leave_out(int row) const {
    if (is_first_of_cluster()) {
      store(p_.ce + row, 0.f);
      store(p_.l1 + row, 0.f);
      store(p_.draft_statistics + row, Statistics{0.f, 0.f, 0.f});
      store(p_.target_statistics + row, Statistics{0.f, 0.f, 0.f});
      store(p_.sides + row, Sides{0.f, 0.f});
    }
    if constexpr (kGradient) {
      E* out = row_of<E>(p_.gradient, row) + first_column();
      for (int unit = thread_index(); unit < units_; unit += kThreads) {
        store_unit(out, unit, Unit<E>{});
      }
    }
  }

  const Parameters& p_;
  Shared& shared_;
  int units_;
  E *draft_, *target_;
};

template <class E, bool kGradient>
__global__ void __launch_bounds__(kThreads, kBlocks)
    resident_kernel(const __grid_constant__ Parameters parameters) {
  Worker<E, kGradient>(parameters).run();
}

constexpr int kOrderThreads = 1024;

// One block: active rows in ascending order from the front, the others from the back, and the
// number of active ones behind.
__global__ void __launch_bounds__(kOrderThreads)
    order_kernel(int rows, const uint8_t* active, int32_t* order) {
  auto* warp_totals = reinterpret_cast<int*>(shared_memory());
  const int lane = thread_index() % kWarp, warp = thread_index() / kWarp;
  int before = 0;  // active rows before this tile
  for (int begin = 0; begin < rows; begin += kOrderThreads) {
    const int row = begin + thread_index();
    const int is_active = row < rows && load(active + row) != 0 ? 1 : 0;
    int inclusive = is_active;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int below = shuffle_up(inclusive, distance);
      if (lane >= distance) inclusive += below;
    }
    if (lane == kWarp - 1) warp_totals[warp] = inclusive;
    block_barrier();
    int tile = 0, in_warps_before = 0;
    for (int w = 0; w < kOrderThreads / kWarp; ++w) {
      if (w < warp) in_warps_before += warp_totals[w];
      tile += warp_totals[w];
    }
    block_barrier();
    const int active_before = before + in_warps_before + inclusive - is_active;
    if (row < rows) {
      store(order + (is_active ? active_before : rows - 1 - (row - active_before)), row);
    }
    before += tile;
  }
  if (thread_index() == 0) store(order + rows, before);
}

bool all_aligned(const Rows& rows) {
  const RowLayout layout = rows.layout();
  if (layout.data % sizeof(Vector) != 0) return false;
  for (int i = 0; i < layout.dimensions; ++i) {
    if (layout.strides[i] % static_cast<int64_t>(sizeof(Vector)) != 0) return false;
  }
  return true;
}

// Of a block, so that kBlocks of them share a multiprocessor.
int most_shared_bytes(const Device& device) {
  return device.shared_bytes / kBlocks - kReservedBytes;
}

// Clusters that the current device holds at once, asked once for each kernel, device and shape.
template <class... P>
int resident_clusters(void (*kernel)(P...), const Shape& shape, const Device& device) {
  using Key = std::tuple<void (*)(P...), int, int, int>;
  static std::mutex mutex;
  static std::vector<std::pair<Key, int>> known;
  const Key key{kernel, device.index, shape.cluster, shape.shared_bytes};
  const std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [other, clusters] : known) {
    if (other == key) return clusters;
  }
  // One allowance for all shapes: a smaller one would take back a larger one's.
  allow_large_clusters(kernel, most_shared_bytes(device));
  const int clusters = max_active_clusters(kernel, shape);
  known.emplace_back(key, clusters);
  return clusters;
}

template <class E, bool kGradient>
bool launch_resident(const WeightedArgs& args, const ResidentPlan& plan, const Device& device,
                     Stream stream) {
  const auto kernel = resident_kernel<E, kGradient>;
  Shape shape{static_cast<unsigned>(plan.cluster), 1, 1, kThreads, plan.shared_bytes, plan.cluster};
  int64_t clusters = resident_clusters(kernel, shape, device);
  if (clusters == 0) return false;
  if (clusters > args.draft->count()) clusters = args.draft->count();
  shape.x = static_cast<unsigned>(clusters * plan.cluster);

  Parameters parameters{};
  parameters.draft = args.draft->layout();
  parameters.target = args.target->layout();
  if (kGradient) parameters.gradient = args.gradient->layout();
  parameters.rows = static_cast<int>(args.draft->count());
  parameters.columns = static_cast<int>(args.draft->columns());
  parameters.units = plan.units;
  parameters.ids = args.ids;
  parameters.ce_coefficient = args.ce_coefficient;
  parameters.l1_coefficient = args.l1_coefficient;
  parameters.ce = args.ce;
  parameters.l1 = args.l1;
  parameters.draft_statistics = reinterpret_cast<Statistics*>(args.draft_statistics);
  parameters.target_statistics = reinterpret_cast<Statistics*>(args.target_statistics);
  parameters.sides = reinterpret_cast<Sides*>(args.sides);
  if (args.active != nullptr) {
    auto* order = static_cast<int32_t*>(args.scratch);
    parameters.order = order;
    launch("order", order_kernel,
           Shape{1, 1, 1, kOrderThreads, kOrderThreads / kWarp * static_cast<int>(sizeof(int))},
           stream, parameters.rows, args.active, order);
  }
  launch("resident", kernel, shape, stream, parameters);
  return true;
}

}  // namespace

ResidentPlan resident_plan(const Rows& draft, const Rows* target, const Rows* gradient,
                           const Device& device) {
  if (device.architecture < 90 || target == nullptr || draft.dtype() != target->dtype()) return {};
  if (draft.columns() == 0 || draft.columns() % kUnitColumns != 0) return {};
  if (!all_aligned(draft) || !all_aligned(*target)) return {};
  if (gradient != nullptr && !all_aligned(*gradient)) return {};
  const int64_t units = draft.columns() / kUnitColumns;
  const int64_t most_units =
      kThreads * (element_size(draft.dtype()) == 4 ? kUnits<float> : kUnits<BFloat16>);
  const int64_t unit_bytes = 2 * kUnitColumns * element_size(draft.dtype());
  for (int cluster = 1; cluster <= kMaxCluster; cluster *= 2) {
    const int64_t block_units = (units + cluster - 1) / cluster;
    const int64_t bytes = static_cast<int64_t>(sizeof(Shared)) + block_units * unit_bytes;
    if (block_units <= most_units && kBlocks * (bytes + kReservedBytes) <= device.shared_bytes) {
      return {cluster, static_cast<int>(block_units), static_cast<int>(bytes)};
    }
  }
  return {};
}

int64_t resident_scratch_bytes(int64_t rows) {
  return (rows + 1) * static_cast<int64_t>(sizeof(int32_t));
}

bool weighted_resident(const WeightedArgs& args, const ResidentPlan& plan, const Device& device,
                       Stream stream) {
  bool launched = false;
  with_element_type(args.draft->dtype(), "weighted", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    launched = args.gradient != nullptr ? launch_resident<E, true>(args, plan, device, stream)
                                        : launch_resident<E, false>(args, plan, device, stream);
  });
  return launched;
}

}  // namespace dspark::cuda
