// How rows and chunks are spread over threads. Nothing here can change a result: a chunk's
// partial result depends on its columns alone, and partial results are combined in column order.
#pragma once

#include <cstdint>

#include "kernels.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace dspark::cpu {
namespace {

// Below this many logits one thread is done before a second one has woken up.
inline constexpr int64_t kSerialElements = 1 << 16;

inline int64_t chunk_count(int64_t columns) {
  return (columns + kChunkColumns - 1) / kChunkColumns;
}

enum class Order { kForward, kBackward };

// Runs f(chunk, begin, size) for each chunk of a row, on `threads` threads. A sweep that runs
// against the direction of the one before begins with what that one left in the cache.
template <class F>
inline void for_each_chunk(int64_t columns, [[maybe_unused]] int threads, Order order, F&& f) {
  const int64_t chunks = chunk_count(columns);
  auto run = [&](int64_t chunk) {
    const int64_t begin = chunk * kChunkColumns;
    f(chunk, begin, columns - begin < kChunkColumns ? columns - begin : kChunkColumns);
  };
#if defined(_OPENMP)
  if (threads > 1 && chunks > 1) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
    return;
  }
#endif
  if (order == Order::kForward) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk) run(chunk);
  } else {
    for (int64_t chunk = chunks; chunk-- > 0;) run(chunk);
  }
}

// Logits in a run of rows that one thread takes at a time, where there are many: about the size
// of a huge page of results, so that two threads do not wait for the same page's first touch.
inline constexpr int64_t kRunElements = 1 << 20;

// Hands every row to a worker. make(thread, threads_within_row) gives a thread its worker, which
// takes row(index) for each of its rows, in ascending order, and finish() after the last. Rows are
// dealt to threads in short runs, since inactive ones cost next to nothing; where there are fewer
// rows than threads, one worker takes all rows and is given all threads for their chunks.
template <class Make>
inline void for_each_row(int64_t rows, int64_t columns, int threads, Make&& make) {
  if (rows * columns < kSerialElements) threads = 1;
#if defined(_OPENMP)
  if (threads > 1 && rows >= threads) {
    const int64_t even = rows / (16 * threads), page = kRunElements / columns;
    int64_t run = even < page ? even : page;
    run = run > 1 ? run : 1;
#pragma omp parallel num_threads(threads)
    {
      auto worker = make(omp_get_thread_num(), 1);
#pragma omp for schedule(dynamic, run) nowait
      for (int64_t row = 0; row < rows; ++row) worker.row(row);
      worker.finish();
    }
    return;
  }
#endif
  auto worker = make(0, threads);
  for (int64_t row = 0; row < rows; ++row) worker.row(row);
  worker.finish();
}

// A worker that keeps nothing from row to row: f(row, thread, threads_within_row).
template <class F>
class RowFunction {
 public:
  RowFunction(F& f, int thread, int team) : f_(f), thread_(thread), team_(team) {}
  void row(int64_t index) { f_(index, thread_, team_); }
  void finish() {}

 private:
  F& f_;
  int thread_, team_;
};

template <class F>
inline void for_each_row_alone(int64_t rows, int64_t columns, int threads, F&& f) {
  for_each_row(rows, columns, threads,
               [&](int thread, int team) { return RowFunction<F>(f, thread, team); });
}

}  // namespace
}  // namespace dspark::cpu
