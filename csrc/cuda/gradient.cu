// gradient: per row a * (p - onehot(y)) + b * p * (s - S) with respect to the draft logits, from
// the rows, their statistics and the two coefficients. Every element is formed in fp32, rounded
// once and written once; neither softmax is materialised. May be written over the draft logits.
#include "columns.h"
#include "portable.h"
#include "statistics.h"

namespace dspark::cuda {
namespace {

// What is known of a row before any of its gradient is.
template <bool kHasTarget>
struct GradientRow {
  Statistics draft;
  float draft_scale, target_m, target_scale;
  Slopes slopes;

  __device__ float element(float x, float t) const {
    const float p = probability(x);
    return slopes.gradient(p, difference(p, t));
  }
  __device__ float label(float x, float t) const {
    const float p = probability(x);
    return slopes.label_gradient(p, difference(p, t), x == draft.m, draft);
  }

 private:
  __device__ float probability(float x) const { return exponential(x, draft.m) * draft_scale; }
  __device__ float difference(float p, float t) const {
    return kHasTarget ? p - exponential(t, target_m) * target_scale : 0.f;
  }
};

// Grid: splits, rows. kHasTarget is false where F is a stand-in.
template <class E, class F, bool kHasTarget>
__global__ void __launch_bounds__(kSplitThreads, 2)
    gradient_kernel(RowLayout draft, RowLayout target, RowLayout gradient, int64_t first,
                    int64_t columns, const int64_t* ids, const uint8_t* active,
                    const Statistics* draft_statistics, const Statistics* target_statistics,
                    const Sides* sides, const float* ce_coefficient, const float* l1_coefficient) {
  const int64_t row = first + block_y();
  const E* x = row_of<const E>(draft, row);
  E* out = row_of<E>(gradient, row);
  const Slice slice = slice_of(x, columns);
  const bool out_aligned = is_aligned(out + slice.head);

  if (active != nullptr && load_uniform(active + row) == 0) {
    const float zeros[kUnitColumns] = {};
    for (int64_t unit = slice.begin + thread_index(); unit < slice.end; unit += kSplitThreads) {
      store_columns(out + slice.column(unit), out_aligned, zeros);
    }
    for (int64_t i = thread_index(); i < slice.loose; i += kSplitThreads) {
      store(out + slice.loose_column(i), from_float<E>(0.f));
    }
    return;
  }

  const int64_t id = ids == nullptr ? kIgnoreIndex : load_uniform(ids + row);
  float a = 0.f;
  if (id != kIgnoreIndex && ce_coefficient != nullptr) {
    a = is_column(id, columns) || id == kElsewhere ? load_uniform(ce_coefficient + row) : kNaN;
  }
  float b = 0.f;
  Statistics q{0.f, 1.f, 0.f};
  Sides both{0.f, 0.f};
  const F* t = nullptr;
  if constexpr (kHasTarget) {
    t = row_of<const F>(target, row);
    if (l1_coefficient != nullptr) b = load_uniform(l1_coefficient + row);
    q = load_uniform(target_statistics + row);
    both = load_uniform(sides + row);
  }
  const Statistics p = load_uniform(draft_statistics + row);
  const GradientRow<kHasTarget> of{p, reciprocal(p.z()), q.m, reciprocal(q.z()),
                                   Slopes(a, b, both)};
  const bool target_aligned = kHasTarget && is_aligned(t + slice.head);

  // A thread reads a unit's logits, the label's among them, before it writes any of the unit: the
  // two may be the same memory.
  const int64_t label_unit =
      id < slice.head || id >= slice.tail ? -1 : (id - slice.head) / kUnitColumns;
  for (int64_t unit = slice.begin + thread_index(); unit < slice.end; unit += kSplitThreads) {
    const int64_t j = slice.column(unit);
    float x_unit[kUnitColumns], t_unit[kUnitColumns] = {}, g[kUnitColumns];
    load_columns(x + j, true, x_unit);
    if constexpr (kHasTarget) load_columns(t + j, target_aligned, t_unit);
#pragma unroll
    for (int i = 0; i < kUnitColumns; ++i) g[i] = of.element(x_unit[i], t_unit[i]);
    if (unit == label_unit) {
#pragma unroll
      for (int i = 0; i < kUnitColumns; ++i) {
        if (j + i == id) g[i] = of.label(x_unit[i], t_unit[i]);
      }
    }
    store_columns(out + j, out_aligned, g);
  }
  for (int64_t i = thread_index(); i < slice.loose; i += kSplitThreads) {
    const int64_t j = slice.loose_column(i);
    const float x_j = to_float(load(x + j));
    float t_j = 0.f;
    if constexpr (kHasTarget) t_j = to_float(load(t + j));
    store(out + j, from_float<E>(j == id ? of.label(x_j, t_j) : of.element(x_j, t_j)));
  }
}

template <class E, class F, bool kHasTarget>
void launch_gradient(const GradientArgs& args, int64_t first, int64_t count, Stream stream) {
  const int64_t columns = args.draft->columns();
  const Shape shape{static_cast<unsigned>(split_count(columns)), static_cast<unsigned>(count), 1,
                    kSplitThreads};
  launch("gradient", gradient_kernel<E, F, kHasTarget>, shape, stream, args.draft->layout(),
         kHasTarget ? args.target->layout() : RowLayout{}, args.gradient->layout(), first, columns,
         args.ids, args.active, reinterpret_cast<const Statistics*>(args.draft_statistics),
         reinterpret_cast<const Statistics*>(args.target_statistics),
         reinterpret_cast<const Sides*>(args.sides), args.ce_coefficient, args.l1_coefficient);
}

}  // namespace

void gradient_of_group(const GradientArgs& args, int64_t first, int64_t count, Stream stream) {
  with_element_type(args.draft->dtype(), "gradient", [&](auto* draft_type) {
    using E = std::remove_pointer_t<decltype(draft_type)>;
    if (args.target == nullptr) return launch_gradient<E, E, false>(args, first, count, stream);
    with_element_type(args.target->dtype(), "gradient", [&](auto* target_type) {
      using F = std::remove_pointer_t<decltype(target_type)>;
      launch_gradient<E, F, true>(args, first, count, stream);
    });
  });
}

void gradient(const GradientArgs& args, int device, void* cuda_stream) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<Stream>(cuda_stream);
  for_each_group(*args.draft, args.target, [&](int64_t first, int64_t count) {
    gradient_of_group(args, first, count, stream);
  });
}

}  // namespace dspark::cuda
