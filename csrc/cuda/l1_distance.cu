// l1_distance: per row l1 = sum |p - q| and the two sides of S = sum sign(p - q) p, 1 - S and
// 1 + S, from two rows of logits and their statistics. Reads both rows once; neither softmax is
// materialised. Over some of a row's columns the results are partial sums.
//
// l1 is a direct sum of absolute differences, since 2 - 2 sum min(p, q) loses everything where
// the distributions are close.
#include "columns.h"
#include "portable.h"
#include "reduce.h"
#include "statistics.h"

namespace dspark::cuda {
namespace {

// A row's way from logits to probabilities.
struct Softmax {
  float m, scale;

  __device__ explicit Softmax(const Statistics& statistics)
      : m(statistics.m), scale(reciprocal(statistics.z())) {}
  __device__ float of(float x) const { return exponential(x, m) * scale; }
};

__device__ __forceinline__ void add(Distance& distance, float p, float q) {
  const float d = p - q;
  distance.add(p, d);
  if (d == 0.f) distance.tie += p;
}

// Grid: splits, rows.
template <class E, class F>
__global__ void __launch_bounds__(kSplitThreads)
    distance_kernel(RowLayout draft, RowLayout target, int64_t first, int64_t columns,
                    const uint8_t* active, const Statistics* draft_statistics,
                    const Statistics* target_statistics, Distance* parts) {
  const int64_t row = first + block_y();
  if (active != nullptr && load_uniform(active + row) == 0) return;
  const E* x = row_of<const E>(draft, row);
  const F* t = row_of<const F>(target, row);
  const Slice slice = slice_of(x, columns);
  const bool target_aligned = is_aligned(t + slice.head);
  const Softmax p(load_uniform(draft_statistics + row)), q(load_uniform(target_statistics + row));

  Distance mine{0.f, 0.f, 0.f, 0.f};
  float draft_batch[kBatchUnits][kUnitColumns], target_batch[kBatchUnits][kUnitColumns];
  for (int64_t unit = slice.begin + thread_index(); unit < slice.end;
       unit += kBatchUnits * kSplitThreads) {
    load_batch(x, slice, unit, true, draft_batch);
    load_batch(t, slice, unit, target_aligned, target_batch);
#pragma unroll
    for (int k = 0; k < kBatchUnits; ++k) {
      Distance part{};  // of a unit: long chains of fp32 additions drift where numbers repeat
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) {
        add(part, p.of(draft_batch[k][i]), q.of(target_batch[k][i]));
      }
      mine = combine(mine, part);
    }
  }
  for (int64_t i = thread_index(); i < slice.loose; i += kSplitThreads) {
    const int64_t j = slice.loose_column(i);
    add(mine, p.of(to_float(load(x + j))), q.of(to_float(load(t + j))));
  }

  auto* slots = reinterpret_cast<Distance*>(shared_memory());
  mine = reduce_block<kSplitThreads>(
      mine, Distance{0.f, 0.f, 0.f, 0.f},
      [](const Distance& a, const Distance& b) { return combine(a, b); }, slots);
  if (thread_index() == 0) store(parts + block_y() * grid_x() + block_x(), mine);
}

// Grid: rows; one warp each.
__global__ void __launch_bounds__(kWarp)
    finish_distance_kernel(int64_t first, const uint8_t* active, const Distance* parts, int splits,
                           float* l1, Sides* sides) {
  const int64_t row = first + block_x();
  Distance all{0.f, 0.f, 0.f, 0.f};
  if (active == nullptr || load_uniform(active + row) != 0) {
    for (int i = thread_index(); i < splits; i += kWarp) {
      all = combine(all, load(parts + block_x() * splits + i));
    }
    all = reduce_warp(all, [](const Distance& a, const Distance& b) { return combine(a, b); });
  }
  if (thread_index() != 0) return;
  store(l1 + row, clamped_l1(all));
  store(sides + row, sides_of(all));
}

}  // namespace

void distance_of_group(const L1DistanceArgs& args, int64_t first, int64_t count, Stream stream) {
  const auto parts = static_cast<Distance*>(args.scratch);
  const Rows& draft = *args.draft;
  const Rows& target = *args.target;
  const int splits = split_count(draft.columns());
  const auto rows = static_cast<unsigned>(count);
  const Shape split{static_cast<unsigned>(splits), rows, 1, kSplitThreads,
                    kSplitThreads / kWarp * static_cast<int>(sizeof(Distance))};
  with_element_type(draft.dtype(), "l1_distance", [&](auto* draft_type) {
    with_element_type(target.dtype(), "l1_distance", [&](auto* target_type) {
      using E = std::remove_pointer_t<decltype(draft_type)>;
      using F = std::remove_pointer_t<decltype(target_type)>;
      launch("distance", distance_kernel<E, F>, split, stream, draft.layout(), target.layout(),
             first, draft.columns(), args.active,
             reinterpret_cast<const Statistics*>(args.draft_statistics),
             reinterpret_cast<const Statistics*>(args.target_statistics), parts);
    });
  });
  launch("finish_distance", finish_distance_kernel, Shape{rows, 1, 1, kWarp}, stream, first,
         args.active, static_cast<const Distance*>(parts), splits, args.l1,
         reinterpret_cast<Sides*>(args.sides));
}

void l1_distance(const L1DistanceArgs& args, int device, void* cuda_stream) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<Stream>(cuda_stream);
  for_each_group(*args.draft, args.target, [&](int64_t first, int64_t count) {
    distance_of_group(args, first, count, stream);
  });
}

}  // namespace dspark::cuda
