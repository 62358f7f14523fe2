// Runs kernels on a host without a GPU: each CUDA thread is a fiber, and what a GPU leaves open
// (which thread runs next, when a block starts, when an asynchronous copy or a remote store lands)
// is drawn from a seed. What the hardware leaves undefined is an EmulationError that names the
// places; what was never written is 0xFF in every byte, a NaN in each format.
//
// This is what primitives.h and runtime.h are made of, and what the tests set and read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace dspark::cuda {
struct Shape;
struct Device;
}  // namespace dspark::cuda

namespace dspark::emulation {

class EmulationError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Where a kernel calls a primitive.
struct Place {
  const char* file;
  int line;
};

enum class Primitive {
  kShuffleXor,
  kShuffleUp,
  kBlockBarrier,
  kClusterArrive,
  kClusterWait,
  kFenceMBarrierInit,
  kMBarrierInit,
  kMBarrierArriveExpecting,
  kMBarrierWait,
  kBulkLoad,
  kSendInCluster,
  kLoad,
  kStore,
};
const char* name_of(Primitive primitive);

// --- What the thread that runs knows -------------------------------------------------------------

struct BlockIdentity {
  int64_t x = 0, y = 0, z = 0;
  int rank = 0;
  char* shared = nullptr;
};
struct ThreadIdentity {
  int index = 0;
  const BlockIdentity* block = nullptr;
};
struct Grid {
  int64_t x = 0;
  int cluster_size = 1;
};

// Of one kernel over all its launches.
struct Counters {
  int64_t launches = 0;
  int64_t bytes_read = 0;     // from global memory, each access by its size
  int64_t bytes_written = 0;  // to global memory, each access by its size
  int64_t exponentials = 0;
  int64_t barriers = 0;          // completed ones, of each block
  int64_t cluster_barriers = 0;  // completed ones, of each cluster
};

// Not thread-local: launches take turns.
extern const ThreadIdentity* current;
extern Grid grid;
extern Counters* counters;

// --- Global memory -------------------------------------------------------------------------------

struct Range {
  uintptr_t begin = 1, end = 0;
  bool writable = false;
};
// The buffers of the latest accesses, by address; a miss costs a search.
inline constexpr size_t kRecentRanges = 64;
extern Range recent_ranges[kRecentRanges];

void check_access(uintptr_t address, size_t bytes, size_t alignment, Primitive primitive,
                  Place place);

inline void access(const void* p, size_t bytes, size_t alignment, Primitive primitive,
                   Place place) {
  const auto address = reinterpret_cast<uintptr_t>(p);
  const Range& range = recent_ranges[(address >> 12) % kRecentRanges];
  const bool writes = primitive == Primitive::kStore;
  if (address % alignment != 0 || address < range.begin || address + bytes > range.end ||
      (writes && !range.writable)) {
    check_access(address, bytes, alignment, primitive, place);
  }
  (writes ? counters->bytes_written : counters->bytes_read) += static_cast<int64_t>(bytes);
}

// A read that all lanes of a warp do together, of the same address: one transaction.
void access_uniform(const void* p, size_t bytes, size_t alignment, Place place);

// --- Threads that wait for each other ------------------------------------------------------------

// `primitive` is one of the two shuffles, `operand` its second argument.
uint32_t shuffle(uint32_t value, int operand, Primitive primitive, Place place);
void block_barrier(Place place);
void cluster_arrive(Place place);
void cluster_wait(Place place);
// 16 bytes.
void send_in_cluster(void* p, int rank, const void* value, uint64_t* barrier, Place place);
void mbarrier_init(uint64_t* barrier, int arrivals, Place place);
void fence_mbarrier_init(Place place);
void mbarrier_arrive_expecting(uint64_t* barrier, uint32_t bytes, Place place);
void mbarrier_wait(uint64_t* barrier, uint32_t parity, Place place);
void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Place place);

// --- Arithmetic ----------------------------------------------------------------------------------

// Off by at most one ulp, by a hash of x: nothing may rely on exact results but 2^0.
float exp2_approximate(float x);
float reciprocal_approximate(float x);

// --- Launches ------------------------------------------------------------------------------------

// Runs `body(parameters)` once for each thread, to completion. Throws CudaError for what a driver
// refuses, EmulationError for what goes wrong in the kernel.
void run(const char* name, const void* kernel, const cuda::Shape& shape,
         void (*body)(const void* parameters), const void* parameters);
void allow_large_clusters(const void* kernel, int shared_bytes);
int max_active_clusters(const void* kernel, const cuda::Shape& shape);

// --- The tests' side -----------------------------------------------------------------------------

// From here on launches draw the same numbers as after any other call with this seed.
void set_seed(uint64_t seed);
const cuda::Device& device();
// Another device takes the place of the current one, with an index of its own: what a launcher
// knows about the old one is not true of it. `clusters` is what max_active_clusters answers where
// the shape fits at all.
void set_device(int architecture, int multiprocessors, int shared_bytes, int64_t l2_bytes);
void set_max_clusters(int clusters);

// Declares a buffer that kernels may touch; `forget` withdraws all of them.
void allow(uintptr_t address, size_t bytes, bool writable, std::string name);
void forget();

struct KernelCounters {
  std::string kernel;
  Counters counters;
};
std::vector<KernelCounters> all_counters();
void reset_counters();

// The synchronisation that has been executed so far, and what of it does nothing from now on.
struct Site {
  std::string file;  // without its folder
  int line;
  Primitive primitive;
};
std::vector<Site> sites();
void skip(const std::vector<std::string>& file_and_line);

}  // namespace dspark::emulation
