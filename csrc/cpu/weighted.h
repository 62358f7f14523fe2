// weighted: the whole row at one visit - ce, l1 and the gradient of a*ce + b*l1. Each logit is
// read once and exponentiated once; what stays between the sweeps is one row of fp32
// exponentials per thread and operand, never a softmax of the whole batch.
//
//   sweep 1  logits -> exponentials relative to their chunk's maximum, chunk maxima and sums
//   sweep 2  exponentials -> l1 and S's sides (chunk maxima are folded into one scale per chunk)
//   sweep 3  exponentials -> gradient
//
// The gradient may be written over the draft logits: sweep 3 of a row begins after the last
// read of that row.
#pragma once

#include "gradient.h"

namespace dspark::cpu {
namespace {

// One thread's scratch, laid out for one operand: exponentials, then chunk statistics.
template <class Real>
struct Operand {
  Reader<Real> reader;
  const void* row;
  Real* e;
  ChunkStatistics* chunks;
  RowStatistics statistics;

  void read_chunk(int64_t i, int64_t begin, int64_t size) {
    chunks[i] = reader.statistics(row, begin, size, e + begin);
  }

  void finish(int64_t columns) {
    std::memset(e + padded<Real>(columns), 0, kBlock<Real> * sizeof(Real));
    statistics = combine<Real>(reader, row, columns, chunks,
                               [&](int64_t begin, int64_t) { return e + begin; });
  }

  // From exponentials relative to the chunk's maximum to probabilities.
  Real scale(int64_t i) const {
    // A chunk of nothing but -inf shrinks to 0; an infinite maximum meets itself, not inf - inf.
    const double shrink =
        chunks[i].maximum == statistics.m ? 1 : ::exp(chunks[i].maximum - statistics.m);
    return static_cast<Real>(shrink / statistics.z());
  }
};

template <class Real>
inline int64_t operand_bytes(int64_t columns) {
  const int64_t exponentials = (padded<Real>(columns) + kBlock<Real>)*sizeof(Real);
  const int64_t chunks = chunk_count(columns) * sizeof(ChunkStatistics);
  return (exponentials + chunks + 63) / 64 * 64;
}

inline int64_t weighted_scratch_bytes(int64_t columns, bool wide) {
  static_assert(sizeof(Distance) == 3 * sizeof(double));
  return 2 * (wide ? operand_bytes<double>(columns) : operand_bytes<float>(columns)) +
         chunk_scratch_bytes(columns);
}

template <class Real>
inline Operand<Real> operand(const Rows* rows, int64_t row, char* scratch) {
  Operand<Real> result{};
  if (rows == nullptr) return result;
  result.reader = reader_for<Real>(rows->dtype());
  result.row = rows->row(row);
  result.e = reinterpret_cast<Real*>(scratch);
  result.chunks =
      reinterpret_cast<ChunkStatistics*>(result.e + padded<Real>(rows->columns()) + kBlock<Real>);
  return result;
}

template <class Real>
void weighted_rows(const WeightedArgs& args) {
  const int64_t columns = args.draft->columns();
  const bool wants_gradient = args.gradient != nullptr;
  const bool streamed = wants_gradient && is_streamed(*args.gradient);
  const Writer<Real> writer =
      wants_gradient ? writer_for<Real>(args.gradient->dtype()) : Writer<Real>{};

  for_each_row(args.draft->count(), columns, args.threads, [&](int64_t row, int thread, int team) {
    RowStatistics draft_statistics{}, target_statistics{};
    Distance distance;
    double ce = 0;
    if (is_active(args.active, row)) {
      char* scratch = static_cast<char*>(args.scratch) +
                      thread * weighted_scratch_bytes(columns, sizeof(Real) == 8);
      Operand<Real> draft = operand<Real>(args.draft, row, scratch);
      scratch += operand_bytes<Real>(columns);
      Operand<Real> target = operand<Real>(args.target, row, scratch);
      scratch += operand_bytes<Real>(columns);
      auto* partial = reinterpret_cast<Distance*>(scratch);
      const bool has_target = target.row != nullptr;

      for_each_chunk(columns, team, Order::kForward, [&](int64_t i, int64_t begin, int64_t size) {
        draft.read_chunk(i, begin, size);
        if (has_target) target.read_chunk(i, begin, size);
      });
      draft.finish(columns);
      draft_statistics = draft.statistics;
      if (has_target) {
        target.finish(columns);
        target_statistics = target.statistics;
        for_each_chunk(columns, team, Order::kBackward,
                       [&](int64_t i, int64_t begin, int64_t size) {
                         partial[i] = chunk_distance<Real>(draft.e + begin, target.e + begin, size,
                                                           draft.scale(i), target.scale(i));
                       });
        for (int64_t i = 0; i < chunk_count(columns); ++i) distance.add(partial[i]);
      }

      const int64_t id = args.ids == nullptr ? kIgnoreIndex : args.ids[row];
      double label_logit = 0;
      if (id != kIgnoreIndex) {
        ce = cross_entropy<Real>(draft.reader, draft.row, id, draft_statistics);
        label_logit = static_cast<double>(draft.reader.at(draft.row, id));
      }

      if (wants_gradient) {
        void* out = args.gradient->row(row);
        const double a =
            id == kIgnoreIndex
                ? 0
                : static_cast<double>(static_cast<const Real*>(args.ce_coefficient)[row]);
        const double b =
            has_target ? static_cast<double>(static_cast<const Real*>(args.l1_coefficient)[row])
                       : 0;
        const Sides sides = distance.sides();
        const Slopes<Real> slopes(a, b, sides);
        for_each_chunk(columns, team, Order::kForward, [&](int64_t i, int64_t begin, int64_t size) {
          const Real p_scale = draft.scale(i);
          const Real q_scale = has_target ? target.scale(i) : Real(0);
          writer.gradient(out, begin, size, draft.e + begin,
                          has_target ? target.e + begin : nullptr, p_scale, q_scale, slopes,
                          streamed);
          finish_streaming(streamed);
          if (id >= begin && id < begin + size) {
            const Real p_y = draft.e[id] * p_scale;
            const Real q_y = has_target ? target.e[id] * q_scale : p_y;
            writer.element(
                out, id,
                label_gradient<Real>(label_logit, p_y, q_y, a, b, sides, draft_statistics));
          }
        });
      }
    } else if (wants_gradient) {
      writer.zeros(args.gradient->row(row), columns, streamed);
      finish_streaming(streamed);
    }
    static_cast<Real*>(args.ce)[row] = static_cast<Real>(ce);
    static_cast<Real*>(args.l1)[row] = static_cast<Real>(distance.clamped_l1());
    if (args.draft_statistics != nullptr) {
      store_statistics<Real>(args.draft_statistics, row, draft_statistics);
    }
    if (args.target_statistics != nullptr) {
      store_statistics<Real>(args.target_statistics, row, target_statistics);
    }
    if (args.sides != nullptr) store_sides<Real>(args.sides, row, distance.sides());
  });
}

}  // namespace
}  // namespace dspark::cpu
