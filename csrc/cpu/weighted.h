// weighted: the whole row at one visit - ce, l1 and the gradient of a*ce + b*l1. Each logit is
// read once and exponentiated once; what stays between the sweeps is one row of fp32
// exponentials per thread and operand, never a softmax of the whole batch.
//
//   sweep 1  forward: logits -> exponentials relative to their chunk's maximum, chunk maxima and
//            sums; and in the same visit to the scratch, the gradient of the row before
//   sweep 2  backward: exponentials -> l1 and S's sides (chunk maxima are folded into one scale
//            per chunk)
//
// A row's gradient waits for the next row's first sweep because the two fit together: one is
// bound by stores to memory, the other by arithmetic, and the exponentials that the gradient has
// just read are overwritten while their lines are still in the first-level cache. The sweeps
// alternate in direction so that each begins with what the last one left in the second level.
//
// The gradient may be written over the draft logits: a row's is written after its last read.
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

  RowStatistics finish(int64_t columns) {
    statistics = combine<Real>(reader, row, columns, chunks,
                               [&](int64_t begin, int64_t) { return e + begin; });
    return statistics;
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
  const int64_t exponentials = padded<Real>(columns) * sizeof(Real);
  const int64_t chunks = chunk_count(columns) * sizeof(ChunkStatistics);
  return (exponentials + chunks + 63) / 64 * 64;
}

inline int64_t weighted_scratch_bytes(int64_t columns, bool wide) {
  static_assert(sizeof(Distance) == 3 * sizeof(double));
  return 2 * (wide ? operand_bytes<double>(columns) : operand_bytes<float>(columns)) +
         chunk_scratch_bytes(columns);
}

template <class Real>
inline Operand<Real> operand(const Rows* rows, int64_t columns, char* scratch) {
  Operand<Real> result{};
  if (rows == nullptr) return result;
  result.reader = reader_for<Real>(rows->dtype());
  result.e = reinterpret_cast<Real*>(scratch);
  result.chunks = reinterpret_cast<ChunkStatistics*>(result.e + padded<Real>(columns));
  return result;
}

// One thread's work: rows in turn, each row's gradient written during the next one's sweep.
template <class Real>
class WeightedWorker {
 public:
  WeightedWorker(const WeightedArgs& args, int thread, int team)
      : args_(args), columns_(args.draft->columns()), team_(team) {
    char* scratch = static_cast<char*>(args.scratch) +
                    thread * weighted_scratch_bytes(columns_, sizeof(Real) == 8);
    draft_ = operand<Real>(args.draft, columns_, scratch);
    target_ = operand<Real>(args.target, columns_, scratch + operand_bytes<Real>(columns_));
    partial_ = reinterpret_cast<Distance*>(scratch + 2 * operand_bytes<Real>(columns_));
    if (args.gradient != nullptr) {
      writer_ = writer_for<Real>(args.gradient->dtype());
      streamed_ = is_streamed(*args.gradient);
    }
  }

  void row(int64_t row) {
    RowResults results;
    if (is_active(args_.active, row)) {
      results = compute(row);
    } else if (args_.gradient != nullptr) {
      writer_.zeros(args_.gradient->row(row), columns_, streamed_);
    }
    static_cast<Real*>(args_.ce)[row] = static_cast<Real>(results.ce);
    static_cast<Real*>(args_.l1)[row] = static_cast<Real>(results.distance.clamped_l1());
    if (args_.draft_statistics != nullptr) {
      store_statistics<Real>(args_.draft_statistics, row, results.draft);
    }
    if (args_.target_statistics != nullptr) {
      store_statistics<Real>(args_.target_statistics, row, results.target);
    }
    if (args_.sides != nullptr) store_sides<Real>(args_.sides, row, results.distance.sides());
  }

  void finish() {
    if (pending_.out != nullptr) {
      for_each_chunk(columns_, team_, Order::kForward, [&](int64_t i, int64_t begin, int64_t size) {
        write_pending(begin, size, draft_.scale(i), target_scale(i));
      });
      finish_pending();
    }
    finish_streaming(streamed_);
  }

 private:
  struct RowResults {
    double ce = 0;
    Distance distance;
    RowStatistics draft{}, target{};
  };

  // A row whose gradient is still to be written, from the exponentials in the scratch.
  struct Pending {
    void* out = nullptr;
    Slopes<Real> slopes{0, 0, Sides{}};
    int64_t label = kIgnoreIndex;
    double label_gradient = 0;
  };

  bool has_target() const { return args_.target != nullptr; }

  Real target_scale(int64_t i) const { return has_target() ? target_.scale(i) : Real(0); }

  RowResults compute(int64_t row) {
    RowResults results;
    draft_.row = args_.draft->row(row);
    if (has_target()) target_.row = args_.target->row(row);
    for_each_chunk(columns_, team_, Order::kForward,
                   [&](int64_t i, int64_t begin, int64_t size) { read_chunk(i, begin, size); });
    finish_pending();

    results.draft = draft_.finish(columns_);
    if (has_target()) {
      results.target = target_.finish(columns_);
      for_each_chunk(columns_, team_, Order::kBackward,
                     [&](int64_t i, int64_t begin, int64_t size) {
                       partial_[i] = chunk_distance<Real>(draft_.e + begin, target_.e + begin, size,
                                                          draft_.scale(i), target_.scale(i));
                     });
      for (int64_t i = 0; i < chunk_count(columns_); ++i) results.distance.add(partial_[i]);
    }
    const int64_t id = args_.ids == nullptr ? kIgnoreIndex : args_.ids[row];
    results.ce = cross_entropy<Real>(draft_.reader, draft_.row, id, results.draft);
    if (args_.gradient != nullptr) leave_pending(row, id, results);
    return results;
  }

  // Statistics of a chunk of this row, and the gradient of the same chunk of the row before.
  void read_chunk(int64_t i, int64_t begin, int64_t size) {
    const bool pending = pending_.out != nullptr;
    const Real p_scale = pending ? draft_.scale(i) : Real(0);
    const Real q_scale = pending ? target_scale(i) : Real(0);
    const Real m = draft_.reader.maximum(draft_.row, begin, size);
    const Real n = has_target() ? target_.reader.maximum(target_.row, begin, size) : Real(0);
    Sum<Real> p_sum, q_sum;
    // The stores of one stretch of gradient drain during the arithmetic of the next stretch.
    for_each_stretch(begin, size, [&](int64_t j, int64_t stretch) {
      if (pending) write_pending(j, stretch, p_scale, q_scale);
      draft_.reader.exponentials(draft_.row, j, stretch, shift(m), draft_.e + j, p_sum);
      if (has_target()) {
        target_.reader.exponentials(target_.row, j, stretch, shift(n), target_.e + j, q_sum);
      }
    });
    draft_.chunks[i] = {static_cast<double>(m), p_sum.total()};
    if (has_target()) target_.chunks[i] = {static_cast<double>(n), q_sum.total()};
  }

  void leave_pending(int64_t row, int64_t id, const RowResults& results) {
    const bool labelled = id != kIgnoreIndex;
    const double a = labelled ? coefficient<Real>(args_.ce_coefficient, row) : 0;
    const double b = has_target() ? coefficient<Real>(args_.l1_coefficient, row) : 0;
    const Sides sides = results.distance.sides();
    pending_ = {args_.gradient->row(row), Slopes<Real>(a, b, sides), id, 0};
    if (labelled) {
      const int64_t chunk = id / kChunkColumns;
      const Real p = draft_.e[id] * draft_.scale(chunk);
      const Real q = has_target() ? target_.e[id] * target_.scale(chunk) : p;
      const double logit = static_cast<double>(draft_.reader.at(draft_.row, id));
      pending_.label_gradient = label_gradient<Real>(logit, p, q, a, b, sides, results.draft);
    }
  }

  void write_pending(int64_t begin, int64_t size, Real p_scale, Real q_scale) {
    writer_.gradient(pending_.out, begin, size, draft_.e + begin,
                     has_target() ? target_.e + begin : nullptr, p_scale, q_scale, pending_.slopes,
                     streamed_);
  }

  void finish_pending() {
    if (pending_.out == nullptr) return;
    if (pending_.label != kIgnoreIndex) {
      finish_streaming(streamed_);
      writer_.element(pending_.out, pending_.label, pending_.label_gradient);
    }
    pending_.out = nullptr;
  }

  const WeightedArgs& args_;
  const int64_t columns_;
  const int team_;
  Operand<Real> draft_, target_;
  Distance* partial_ = nullptr;
  Writer<Real> writer_{};
  bool streamed_ = false;
  Pending pending_;
};

template <class Real>
void weighted_rows(const WeightedArgs& args) {
  for_each_row(args.draft->count(), args.draft->columns(), args.threads,
               [&](int thread, int team) { return WeightedWorker<Real>(args, thread, team); });
}

}  // namespace
}  // namespace dspark::cpu
