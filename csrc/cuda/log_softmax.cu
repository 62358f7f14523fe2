// log_softmax: per row the statistics (m, c, T) - maximum, how many columns equal it, sum of
// exp(x_j - m) over the others - and the log-probability of one id. Reads a row once; the
// log-probabilities of the other columns are not materialised.
//
// A row is split over several blocks. A second kernel combines their parts in the order of the
// splits and writes what is known of the row.
#include <stdexcept>

#include "columns.h"
#include "portable.h"
#include "reduce.h"
#include "statistics.h"

namespace dspark::cuda {
namespace {

// A thread's statistics with a batch of columns more. The sum is rescaled once a batch, not once
// a column.
__device__ __forceinline__ void add_columns(Statistics& s,
                                            const float (&x)[kBatchUnits][kUnitColumns]) {
  float m = s.m;
#pragma unroll
  for (const auto& unit : x) {
#pragma unroll
    for (const float value : unit) m = maximum(m, value);
  }
  if (m > s.m) {
    s.t = (s.c + s.t) * exponential(s.m, m);
    s.c = 0.f;
    s.m = m;
  }
  const float base = shift(m);
#pragma unroll
  for (const auto& unit : x) {
    float t = 0.f;  // of a unit: long chains of fp32 additions drift where numbers repeat
#pragma unroll
    for (const float value : unit) {
      const float e = exponential(value, base);  // NaN passes the maximum by and arrives here
      if (value == m) {
        s.c += 1.f;
      } else {
        t += e;
      }
    }
    s.t += t;
  }
}

// Grid: splits, rows.
template <class E>
__global__ void __launch_bounds__(kSplitThreads)
    statistics_kernel(RowLayout rows, RowLayout order, int order_size, int64_t first,
                      int64_t columns, const uint8_t* active, Statistics* parts) {
  const int64_t row = first + block_y();
  if (active != nullptr && load_uniform(active + row) == 0) return;
  const E* x = row_of<const E>(rows, row);
  const Slice slice = slice_of(row_of<const void>(order, row), order_size, columns);
  const bool aligned = is_aligned(x + slice.head);

  Statistics mine = no_columns();
  float batch[kBatchUnits][kUnitColumns];
  for (int64_t unit = slice.begin + thread_index(); unit < slice.end;
       unit += kBatchUnits * kSplitThreads) {
    load_batch(x, slice, unit, aligned, batch);
    add_columns(mine, batch);
  }
  for (int64_t i = thread_index(); i < slice.loose; i += kSplitThreads) {
    const float value = to_float(load(x + slice.loose_column(i)));
    const bool is_number = value == value;
    const Statistics one{is_number ? value : -kInfinity, is_number ? 1.f : 0.f,
                         is_number ? 0.f : value};
    mine = combine(mine, one);
  }

  auto* slots = reinterpret_cast<Statistics*>(shared_memory());
  mine = reduce_block<kSplitThreads>(
      mine, no_columns(), [](const Statistics& a, const Statistics& b) { return combine(a, b); },
      slots);
  if (thread_index() == 0) store(parts + block_y() * grid_x() + block_x(), mine);
}

// Grid: rows; one warp each.
template <class E>
__global__ void __launch_bounds__(kWarp)
    finish_statistics_kernel(RowLayout rows, int64_t first, int64_t columns, const int64_t* ids,
                             const uint8_t* active, const Statistics* parts, int splits, float sign,
                             Statistics* statistics, float* log_prob) {
  const int64_t row = first + block_x();
  const bool is_active = active == nullptr || load_uniform(active + row) != 0;
  Statistics all{0.f, 0.f, 0.f};
  if (is_active) {
    all = no_columns();
    for (int i = thread_index(); i < splits; i += kWarp) {
      all = combine(all, load(parts + block_x() * splits + i));
    }
    all = reduce_warp(all, [](const Statistics& a, const Statistics& b) { return combine(a, b); });
  }
  if (thread_index() != 0) return;
  if (all.m == -kInfinity) all.c = static_cast<float>(columns);  // padding was counted as well
  store(statistics + row, all);
  if (log_prob == nullptr) return;
  float ce = 0.f;
  if (is_active && ids != nullptr) {
    const int64_t id = load_uniform(ids + row);
    if (is_column(id, columns)) {
      ce = cross_entropy(to_float(load(row_of<const E>(rows, row) + id)), all);
    } else if (id != kIgnoreIndex) {
      ce = kNaN;
    }
  }
  store(log_prob + row, sign * ce);
}

}  // namespace

void statistics_of_group(const StatisticsGroup& group, Stream stream) {
  const auto parts = static_cast<Statistics*>(group.parts);
  const Rows& logits = *group.logits;
  const int splits = split_count(logits.columns());
  const auto rows = static_cast<unsigned>(group.count);
  with_element_type(logits.dtype(), "log_softmax", [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    const Shape split{static_cast<unsigned>(splits), rows, 1, kSplitThreads,
                      kSplitThreads / kWarp * static_cast<int>(sizeof(Statistics))};
    launch("statistics", statistics_kernel<E>, split, stream, logits.layout(),
           group.order->layout(), static_cast<int>(element_size(group.order->dtype())), group.first,
           logits.columns(), group.active, parts);
    launch("finish_statistics", finish_statistics_kernel<E>, Shape{rows, 1, 1, kWarp}, stream,
           logits.layout(), group.first, logits.columns(), group.ids, group.active,
           static_cast<const Statistics*>(parts), splits, group.sign,
           reinterpret_cast<Statistics*>(group.statistics), group.log_prob);
  });
}

void log_softmax(const LogSoftmaxArgs& args, int device, void* cuda_stream) {
  const DeviceGuard guard(device);
  const auto stream = static_cast<Stream>(cuda_stream);
  for_each_group(*args.logits, nullptr, [&](int64_t first, int64_t count) {
    statistics_of_group({args.logits, args.order, first, count, args.ids, args.active,
                         args.statistics, -1.f, args.log_prob, args.scratch},
                        stream);
  });
}

}  // namespace dspark::cuda
