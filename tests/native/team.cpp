// What GCC's OpenMP calls, over std::thread. ThreadSanitizer knows what orders these threads, and
// does not know it of libgomp's, all of whose barriers it would take for races. Every thread but
// the first is new to a region, and takes its part of a loop as it comes.
#include <mutex>
#include <thread>
#include <vector>

namespace {

struct Team {
  explicit Team(unsigned threads) : size(threads) {}

  const unsigned size;
  std::mutex mutex;  // of what follows: the one loop of a region
  bool begun = false;
  long next = 0, end = 0, step = 1, chunk = 1;

  bool take(long* first, long* last) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (next >= end) return false;
    *first = next;
    next = next + chunk * step < end ? next + chunk * step : end;
    *last = next;
    return true;
  }
};

thread_local Team* current = nullptr;
thread_local unsigned number = 0;

}  // namespace

extern "C" {

int omp_get_thread_num() { return static_cast<int>(number); }
int omp_get_num_threads() { return current == nullptr ? 1 : static_cast<int>(current->size); }

void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  Team team(threads);
  const auto run = [&](unsigned i) {
    current = &team;
    number = i;
    body(data);
    current = nullptr;
    number = 0;
  };
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(run, i);
  run(0);
  for (std::thread& other : others) other.join();
}

bool GOMP_loop_nonmonotonic_dynamic_start(long begin, long end, long step, long chunk, long* first,
                                          long* last) {
  {
    const std::lock_guard<std::mutex> lock(current->mutex);
    if (!current->begun) {
      current->begun = true;
      current->next = begin;
      current->end = end;
      current->step = step;
      current->chunk = chunk;
    }
  }
  return current->take(first, last);
}

bool GOMP_loop_nonmonotonic_dynamic_next(long* first, long* last) {
  return current->take(first, last);
}

void GOMP_loop_end_nowait() {}

}  // extern "C"
