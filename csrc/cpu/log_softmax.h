// log_softmax: per row the statistics (m, c, T) - maximum, how many columns equal it, sum of
// exp(x_j - m) over the others - and the log-probability of one id. Reads a row once; the
// log-probabilities of the other columns are not materialised.
//
// T leaves the maximum out because a confident row is all maximum: next to its 1, an fp32 sum
// loses the rest. Each chunk is summed relative to its own maximum; only the chunks that turn
// out to hold the row's maximum are summed again without it.
#pragma once

#include "elements.h"
#include "threads.h"

namespace dspark::cpu {
namespace {

struct ChunkStatistics {
  double maximum;
  double sum;  // of exp(x_j - maximum) over the whole chunk
};

struct RowStatistics {
  double m, c, t;

  // As in PyTorch, a row without a finite logit, or with +inf, has no distribution: m - m makes
  // it NaN. Decided here and not in T, since a shard of nothing but -inf may belong to a row that
  // has a distribution.
  double z() const { return m - m + c + t; }
  double log_z() const { return ::log1p(m - m + c - 1 + t); }
};

// Columns that are added up in one go, 32 vectors of fp32. Sums of stretches are then added to one
// another: two short chains of fp32 additions in place of a long one, whose rounding errors drift
// where a row holds few different values, as bfloat16 rows do.
inline constexpr int64_t kStretchColumns = 8 * kVectorBytes;

// Runs f(begin, size) for each stretch of a chunk's columns [begin, begin + size).
template <class F>
inline void for_each_stretch(int64_t begin, int64_t size, F&& f) {
  for (int64_t i = begin; i < begin + size; i += kStretchColumns) {
    const int64_t left = begin + size - i;
    f(i, left < kStretchColumns ? left : kStretchColumns);
  }
}

// The sum of a chunk's exponentials, as far as its stretches have been visited.
template <class Real>
struct Sum {
  Vec<Real> lanes[2] = {};

  double total() const { return sum_lanes<Real>(lanes[0] + lanes[1]); }
};

// What to subtract from a chunk's logits: a chunk of nothing but -inf has no finite maximum, and
// with 0 in its place its exponentials are 0.
template <class Real>
inline Real shift(Real maximum) {
  return maximum == -std::numeric_limits<Real>::infinity() ? Real(0) : maximum;
}

// Scratch of the kernels that keep one partial result per chunk: statistics, or a Distance.
inline int64_t chunk_scratch_bytes(int64_t columns) {
  constexpr int64_t kPartialBytes = 3 * sizeof(double);
  static_assert(sizeof(ChunkStatistics) <= kPartialBytes);
  return (chunk_count(columns) * kPartialBytes + 63) / 64 * 64;
}

// What one element type can do with the columns of a chunk. `e` receives the exponentials,
// filled up with zeros to a whole block, so that later passes over them need no tail.
template <class Real>
struct Reader {
  Real (*maximum)(const void* row, int64_t begin, int64_t size);
  void (*exponentials)(const void* row, int64_t begin, int64_t size, Real m, Real* e,
                       Sum<Real>& sum);
  void (*count_maxima)(const void* row, int64_t begin, int64_t size, Real m, const Real* e,
                       double* c, double* t);
  Real (*at)(const void* row, int64_t column);
};

template <class Real>
inline int64_t padded(int64_t columns) {
  return (columns + kBlock<Real> - 1) / kBlock<Real> * kBlock<Real>;
}

// A chunk's exponentials on the stack.
template <class Real>
struct ChunkExponentials {
  alignas(64) Real values[kChunkColumns];
};

// Visits a chunk in blocks of kBlock columns; the last, partial block is presented from a
// buffer filled up with -inf, which is neutral for a maximum and has the exponential 0.
template <class Real, class E, class F>
inline void for_each_block(const E* x, int64_t size, F&& f) {
  int64_t i = 0;
  for (; i + kBlock<Real> <= size; i += kBlock<Real>) f(i, x + i);
  if (i < size) {
    E padded[kBlock<Real>];
    for (E& element : padded) element = from_real<E>(-std::numeric_limits<double>::infinity());
    std::memcpy(padded, x + i, static_cast<size_t>(size - i) * sizeof(E));
    f(i, static_cast<const E*>(padded));
  }
}

template <class Real, class E>
inline Real chunk_maximum(const E* x, int64_t size) {
  Vec<Real> best[kUnroll];
  for (auto& b : best) b = broadcast(-std::numeric_limits<Real>::infinity());
  for_each_block<Real>(x, size, [&](int64_t, const E* block) {
    for (int u = 0; u < kUnroll; ++u) {
      best[u] = max<Real>(load<Real>(block + u * kLanes<Real>), best[u]);
    }
  });
  return max_lanes<Real>(max<Real>(max<Real>(best[0], best[1]), max<Real>(best[2], best[3])));
}

// exp(x_j - m) of one stretch into e, added to a sum. While this computes, the logits that the next
// chunk's maximum will want are on their way from memory.
template <class Real, class E>
void exponentials_of(const void* row, int64_t begin, int64_t size, Real m, Real* e,
                     Sum<Real>& sum) {
  const E* x = static_cast<const E*>(row) + begin;
  Vec<Real> lanes[2] = {};
  for_each_block<Real>(x, size, [&](int64_t i, const E* block) {
    constexpr int64_t kBytes = kBlock<Real> * sizeof(E);
    const char* ahead = reinterpret_cast<const char*>(x + kChunkColumns + i);
    for (int64_t line = 0; line < kBytes; line += 64) __builtin_prefetch(ahead + line, 0, 0);
    for (int u = 0; u < kUnroll; ++u) {
      const Vec<Real> y = exponential(load<Real>(block + u * kLanes<Real>) - m);
      lanes[u % 2] += y;
      std::memcpy(e + i + u * kLanes<Real>, &y, sizeof y);
    }
  });
  sum.lanes[0] += lanes[0];
  sum.lanes[1] += lanes[1];
}

template <class Real, class E>
Real maximum_of(const void* row, int64_t begin, int64_t size) {
  return chunk_maximum<Real>(static_cast<const E*>(row) + begin, size);
}

// exp(x_j - m) of a whole chunk into e, and their sum.
template <class Real>
inline double chunk_exponentials(const Reader<Real>& reader, const void* row, int64_t begin,
                                 int64_t size, Real m, Real* e) {
  Sum<Real> sum;
  for_each_stretch(begin, size, [&](int64_t i, int64_t stretch) {
    reader.exponentials(row, i, stretch, m, e + (i - begin), sum);
  });
  return sum.total();
}

template <class Real>
inline ChunkStatistics chunk_statistics(const Reader<Real>& reader, const void* row, int64_t begin,
                                        int64_t size, Real* e) {
  const Real m = reader.maximum(row, begin, size);
  return {static_cast<double>(m), chunk_exponentials(reader, row, begin, size, shift(m), e)};
}

template <class Real, class E>
void count_maxima_of(const void* row, int64_t begin, int64_t size, Real m, const Real* e, double* c,
                     double* t) {
  Vec<Real> others[kUnroll] = {};
  IntVec<Real> maxima = {};
  for_each_block<Real>(static_cast<const E*>(row) + begin, size, [&](int64_t i, const E* block) {
    for (int u = 0; u < kUnroll; ++u) {
      Vec<Real> y;
      std::memcpy(&y, e + i + u * kLanes<Real>, sizeof y);
      const IntVec<Real> is_maximum = load<Real>(block + u * kLanes<Real>) == m;
      maxima -= is_maximum;
      others[u] += select<Real>(~is_maximum, y);
    }
  });
  for (int i = 0; i < kLanes<Real>; ++i) *c += static_cast<double>(maxima[i]);
  *t += sum_lanes<Real>((others[0] + others[1]) + (others[2] + others[3]));
}

template <class Real, class E>
Real element_at(const void* row, int64_t column) {
  return to_real<Real>(static_cast<const E*>(row)[column]);
}

template <class Real>
inline Reader<Real> reader_for(DType dtype) {
  Reader<Real> reader{};
  with_element_type(dtype, [&](auto* type) {
    using E = std::remove_pointer_t<decltype(type)>;
    if constexpr (sizeof(E) <= sizeof(Real)) {
      reader = {maximum_of<Real, E>, exponentials_of<Real, E>, count_maxima_of<Real, E>,
                element_at<Real, E>};
    }
  });
  return reader;
}

// Chunk statistics into row statistics, in column order. `exponentials(begin, size)`
// gives those of a chunk relative to that chunk's own maximum.
template <class Real, class F>
inline RowStatistics combine(const Reader<Real>& reader, const void* row, int64_t columns,
                             const ChunkStatistics* chunks, F&& exponentials) {
  RowStatistics result{-std::numeric_limits<double>::infinity(), 0, 0};
  for (int64_t i = 0; i < chunk_count(columns); ++i) {
    result.m = chunks[i].maximum > result.m ? chunks[i].maximum : result.m;
  }
  for_each_chunk(columns, 1, Order::kForward, [&](int64_t i, int64_t begin, int64_t size) {
    if (chunks[i].maximum == result.m) {
      const Real* e = exponentials(begin, size);
      for_each_stretch(begin, size, [&](int64_t j, int64_t stretch) {
        reader.count_maxima(row, j, stretch, static_cast<Real>(result.m), e + (j - begin),
                            &result.c, &result.t);
      });
    } else {
      result.t += chunks[i].sum * ::exp(chunks[i].maximum - result.m);
    }
  });
  return result;
}

template <class Real>
inline void store_statistics(void* all, int64_t row, const RowStatistics& statistics) {
  Real* out = static_cast<Real*>(all) + 3 * row;
  out[0] = static_cast<Real>(statistics.m);
  out[1] = static_cast<Real>(statistics.c);
  out[2] = static_cast<Real>(statistics.t);
}

template <class Real>
inline RowStatistics load_statistics(const void* all, int64_t row) {
  const Real* in = static_cast<const Real*>(all) + 3 * row;
  return {static_cast<double>(in[0]), static_cast<double>(in[1]), static_cast<double>(in[2])};
}

inline constexpr int64_t kIgnoreIndex = -100;

// log(Z) - (x_y - m): a large common offset cancels before any rounding.
template <class Real>
inline double cross_entropy(const Reader<Real>& reader, const void* row, int64_t id,
                            const RowStatistics& statistics) {
  if (id == kIgnoreIndex) return 0;
  return statistics.log_z() - (static_cast<double>(reader.at(row, id)) - statistics.m);
}

inline bool is_active(const uint8_t* active, int64_t row) {
  return active == nullptr || active[row] != 0;
}

template <class Real>
void log_softmax_rows(const LogSoftmaxArgs& args) {
  const int64_t columns = args.logits->columns();
  const Reader<Real> reader = reader_for<Real>(args.logits->dtype());
  Real* log_prob = static_cast<Real*>(args.log_prob);
  for_each_row_alone(
      args.logits->count(), columns, args.threads, [&](int64_t row, int thread, int team) {
        RowStatistics statistics{};
        double ce = 0;
        if (is_active(args.active, row)) {
          const void* x = args.logits->row(row);
          auto* chunks = reinterpret_cast<ChunkStatistics*>(static_cast<char*>(args.scratch) +
                                                            thread * chunk_scratch_bytes(columns));
          for_each_chunk(columns, team, Order::kForward,
                         [&](int64_t i, int64_t begin, int64_t size) {
                           ChunkExponentials<Real> e;
                           chunks[i] = chunk_statistics(reader, x, begin, size, e.values);
                         });
          ChunkExponentials<Real> e;
          statistics = combine<Real>(reader, x, columns, chunks, [&](int64_t begin, int64_t size) {
            chunk_statistics(reader, x, begin, size, e.values);
            return e.values;
          });
          if (log_prob != nullptr) ce = cross_entropy<Real>(reader, x, args.ids[row], statistics);
        }
        store_statistics<Real>(args.statistics, row, statistics);
        if (log_prob != nullptr) log_prob[row] = static_cast<Real>(-ce);
      });
}

}  // namespace
}  // namespace dspark::cpu
