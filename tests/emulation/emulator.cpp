#include "emulator.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <utility>

#include "fiber.h"
#include "runtime.h"

#ifdef DSPARK_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#endif

namespace dspark::emulation {

const ThreadIdentity* current = nullptr;
Grid grid;
Counters* counters = nullptr;
Range recent_ranges[kRecentRanges];

namespace {

constexpr int kWarp = 32;
constexpr int kSharedBytesByDefault = 48 << 10;
constexpr int kClusterByDefault = 8;
constexpr int64_t kTransactionLimit = (1 << 20) - 1;  // of an mbarrier's pending bytes
constexpr unsigned char kPoison = 0xFF;

// --- State ---------------------------------------------------------------------------------------

struct Block;
struct Warp;

constexpr size_t kSentBytes = 16;  // by one send to another block

// Most of a switch is waiting for memory: what it needs first lies together.
struct alignas(64) Thread : ThreadIdentity {
  Warp* warp = nullptr;
  int lane = 0;
  Fiber fiber;
  bool ended = false;
  // What it waits for, or waited for last.
  Primitive primitive{};
  Place place{};
  const struct MBarrierState* mbarrier = nullptr;
  // Between its cluster_arrive and its cluster_wait.
  bool arrived = false;
  int64_t arrived_phase = 0;
};

// What the lanes of a warp read at one place, call by call: each lane the same.
struct UniformReads {
  Place place;
  std::vector<uintptr_t> addresses;
  size_t calls[kWarp] = {};
};

struct Warp {
  Block* block = nullptr;
  Thread* const* threads = nullptr;
  int lanes = 0;
  uint32_t ready = 0;   // lanes that can run
  size_t position = 0;  // among the runnable warps, where `ready` is not 0
  int ended = 0;
  // Lanes that wait in a shuffle, what they gave to it, and then what it returns to each.
  uint32_t shuffle = 0;
  Primitive shuffle_primitive{};
  Place shuffle_place{};
  uint32_t values[kWarp];
  int operands[kWarp];
  std::vector<UniformReads> uniform_reads;
};

struct MBarrierState {
  MBarrierState(uint64_t* address, const Thread* initialiser, int arrivals)
      : address(address), initialiser(initialiser), expected(arrivals), pending(arrivals) {}

  uint64_t* address;
  const Thread* initialiser;
  bool fenced = false;
  int expected;  // arrivals of each phase
  int pending;   // arrivals of this phase
  int64_t bytes = 0;
  int64_t phase = 0;
  int64_t seen = 0;  // phases that some thread knows to be complete
  // The last phase that a copy or a send counted in, which somebody has to wait for.
  int64_t used = -1;
  Primitive user{};
  Place user_place{};
  std::vector<Thread*> waiting;
};

struct Block : BlockIdentity {
  std::vector<Warp> warps;
  Thread* const* threads = nullptr;
  bool started = false;
  int ended = 0;
  int barrier_arrived = 0;
  Place barrier_place{};
  std::deque<MBarrierState> mbarriers;  // in shared memory lies an index into it
  std::vector<char> memory;
};

struct Copy {
  Block* block;             // where it goes
  uint64_t* barrier;        // to which it reports, in the same block
  MBarrierState* mbarrier;  // the same; null for a send, until that lands
  char* begin;
  const char* source;
  uint32_t bytes, left;
  Primitive primitive;
  Place place;
  unsigned char value[kSentBytes];  // what a send carries
};
struct Piece {
  Copy* copy;
  uint32_t offset, bytes;
};

struct Buffer {
  uintptr_t begin, end;
  bool writable;
  std::string name;
};

// How one cluster is scheduled. Uniform choices let all threads advance alike; it is long runs of
// one warp, late blocks and late copies that find what is not synchronised.
struct Temper {
  uint32_t burst;     // threads that run before another warp is drawn, at most
  uint32_t starting;  // draws until another block starts, on average
  uint32_t delivery;  // threads that run before a piece of a copy lands, at most
  uint32_t stall;     // draws for which one block is held back, at most
};

struct State {
  std::mutex turn;
  uint64_t random = 0x9E3779B97F4A7C15u;
  cuda::Device device{0, 90, 132, 233472, int64_t{60} << 20};
  int max_clusters = 3;
  std::map<const void*, int> allowed;  // kernels, and how much shared memory they may have
  std::vector<Buffer> buffers;         // by address
  std::map<std::string, Counters> counters;

  // The launch.
  const char* name = "";
  bool clustered = false;
  int threads = 0, shared_bytes = 0;
  void (*body)(const void*) = nullptr;
  const void* parameters = nullptr;

  // The cluster.
  std::vector<std::unique_ptr<Thread>> pool;
  std::vector<Thread*> thread_pointers;
  std::vector<Block> blocks;
  std::vector<Block*> unstarted;
  std::vector<Warp*> runnable;
  std::vector<std::unique_ptr<Copy>> copies;
  std::vector<Piece> pieces;
  int ended = 0;
  int arrived = 0;
  Place arrive_place{};
  int64_t phase = 0;
  std::vector<Thread*> cluster_waiting;

  // The scheduler.
  Temper temper{};
  Fiber main;
  bool main_runs = true;
  Thread* thread = nullptr;
  Warp* warp = nullptr;
  uint32_t burst = 0, delivery = 0, stall = 0;
  const Block* stalled = nullptr;
  std::exception_ptr failure;
};

State s;

// xorshift64*. Numbers below n, which is not 0.
uint32_t random_below(uint32_t n) {
  s.random ^= s.random >> 12;
  s.random ^= s.random << 25;
  s.random ^= s.random >> 27;
  const uint64_t high = (s.random * 0x2545F4914F6CDD1Du) >> 32;
  return static_cast<uint32_t>(high * n >> 32);
}

template <class T, size_t n>
T random_of(const T (&choices)[n]) {
  return choices[random_below(n)];
}

template <class T>
T take_random(std::vector<T>& values) {
  const size_t i = random_below(static_cast<uint32_t>(values.size()));
  T value = values[i];
  values[i] = values.back();
  values.pop_back();
  return value;
}

// --- Reports -------------------------------------------------------------------------------------

std::string basename(const char* file) {
  const char* slash = std::strrchr(file, '/');
  return slash == nullptr ? file : slash + 1;
}
std::string text(Place place) { return basename(place.file) + ":" + std::to_string(place.line); }

bool same(Place a, Place b) {
  return a.line == b.line && (a.file == b.file || std::strcmp(a.file, b.file) == 0);
}

std::string text(const BlockIdentity& block) {
  std::string result = "block (" + std::to_string(block.x) + ", " + std::to_string(block.y) + ", " +
                       std::to_string(block.z) + ")";
  if (s.clustered) result += " of rank " + std::to_string(block.rank);
  return result;
}
std::string threads_text(int count) {
  return std::to_string(count) + (count == 1 ? " thread" : " threads");
}

[[noreturn]] void fail(const std::string& message) {
  throw EmulationError(std::string("kernel ") + s.name + ": " + message);
}
[[noreturn]] void fail(Primitive primitive, Place place, const std::string& message) {
  fail(std::string(name_of(primitive)) + " at " + text(place) + " by thread " +
       std::to_string(current->index) + " of " + text(*current->block) + ": " + message);
}

[[noreturn]] void report_deadlock() {
  using Key = std::pair<const Block*, std::pair<std::string, std::string>>;
  std::map<Key, int> waiting;
  for (const Block& block : s.blocks) {
    for (int i = 0; i < s.threads; ++i) {
      const Thread& thread = *block.threads[i];
      if (thread.ended) continue;
      std::string detail;
      if (thread.primitive == Primitive::kMBarrierWait) {
        const MBarrierState& mbarrier = *thread.mbarrier;
        detail = " (phase " + std::to_string(mbarrier.phase) + " lacks " +
                 std::to_string(mbarrier.pending) + " arrivals and " +
                 std::to_string(mbarrier.bytes) + " bytes)";
      }
      ++waiting[{&block,
                 {std::string(name_of(thread.primitive)) + " at " + text(thread.place), detail}}];
    }
  }
  std::string message = "deadlock, nothing can run:";
  for (const auto& [key, count] : waiting) {
    message += "\n  " + threads_text(count) + " of " + text(*key.first) + " in " +
               key.second.first + key.second.second;
  }
  for (const Block& block : s.blocks) {
    if (block.ended > 0) {
      message += "\n  " + threads_text(block.ended) + " of " + text(block) + " ended";
    }
  }
  fail(message);
}

// --- Sites ---------------------------------------------------------------------------------------

struct SiteKey {
  const char* file;
  int line;
  Primitive primitive;
  bool operator<(const SiteKey& other) const {
    if (file != other.file) return file < other.file;
    return line != other.line ? line < other.line : primitive < other.primitive;
  }
};
std::map<SiteKey, bool> executed_sites;  // and whether each is skipped
std::set<std::string> skipped_sites;

// Whether the call does nothing; remembers that it was made.
bool skips(Primitive primitive, Place place) {
  struct Recent {
    SiteKey key;
    const bool* skipped;
  };
  static Recent recent[16];
  const SiteKey key{place.file, place.line, primitive};
  Recent& entry = recent[static_cast<size_t>(place.line) % 16];
  if (entry.skipped == nullptr || entry.key < key || key < entry.key) {
    const auto [site, added] = executed_sites.try_emplace(key, false);
    if (added) site->second = skipped_sites.count(text(place)) != 0;
    entry = {key, &site->second};
  }
  return *entry.skipped;
}

// --- Scheduler -----------------------------------------------------------------------------------

void make_ready(Warp& warp, uint32_t lanes) {
  if (warp.ready == 0) {
    warp.position = s.runnable.size();
    s.runnable.push_back(&warp);
  }
  warp.ready |= lanes;
}
void make_ready(Thread& thread) { make_ready(*thread.warp, 1u << thread.lane); }

uint32_t all_lanes(const Warp& warp) {
  return warp.lanes == kWarp ? 0xFFFFFFFFu : (1u << warp.lanes) - 1;
}

// Shared memory begins between two stretches that no thread may touch, 128 bytes off a multiple of
// 256, since no more than 128 is promised.
constexpr size_t kMargin = 1024;

void protect_margins(const Block& block, bool on) {
#ifdef DSPARK_EMULATION_ASAN
  const auto bytes = static_cast<size_t>(s.shared_bytes);
  if (on) {
    ASAN_POISON_MEMORY_REGION(block.shared - kMargin, kMargin);
    ASAN_POISON_MEMORY_REGION(block.shared + bytes, kMargin);
  } else {
    ASAN_UNPOISON_MEMORY_REGION(block.shared - kMargin, bytes + 2 * kMargin);
  }
#else
  (void)block;
  (void)on;
#endif
}

void start(Block& block) {
  block.started = true;
  // What another block has stored here so far is lost.
  std::memset(block.shared - kMargin, kPoison, static_cast<size_t>(s.shared_bytes) + 2 * kMargin);
  protect_margins(block, true);
  for (Warp& warp : block.warps) make_ready(warp, all_lanes(warp));
}

void end(Block& block) {
  for (const MBarrierState& mbarrier : block.mbarriers) {
    if (mbarrier.used >= mbarrier.seen) {
      fail(text(block) + " ended without a wait for the " + name_of(mbarrier.user) + " at " +
           text(mbarrier.user_place));
    }
  }
  for (const auto& copy : s.copies) {
    if (copy->block == &block) {
      fail(text(block) + " ended before it was reached by the " + name_of(copy->primitive) +
           " at " + text(copy->place));
    }
  }
  protect_margins(block, false);
  const char* ends[] = {block.shared - kMargin, block.shared + s.shared_bytes};
  for (const char* margin : ends) {
    for (size_t i = 0; i < kMargin; ++i) {
      if (static_cast<unsigned char>(margin[i]) != kPoison) {
        fail(text(block) + " wrote outside its shared memory, at byte " +
             std::to_string(margin + i - block.shared) + " of " + std::to_string(s.shared_bytes));
      }
    }
  }
}

void complete_phase_if_due(MBarrierState& mbarrier) {
  if (mbarrier.pending != 0 || mbarrier.bytes != 0) return;
  ++mbarrier.phase;
  mbarrier.pending = mbarrier.expected;
  for (Thread* thread : mbarrier.waiting) make_ready(*thread);
  mbarrier.waiting.clear();
}

void add_bytes(MBarrierState& mbarrier, int64_t bytes, Primitive primitive, Place place) {
  mbarrier.bytes += bytes;
  if (mbarrier.bytes > kTransactionLimit || mbarrier.bytes < -kTransactionLimit) {
    fail(std::string(name_of(primitive)) + " at " + text(place) + " makes an mbarrier expect " +
         std::to_string(mbarrier.bytes) + " bytes; it counts to 2^20 - 1");
  }
}

MBarrierState* find_mbarrier(Block& block, uint64_t* barrier);

// A block that has not begun cannot be written to, whatever comes later.
void resolve_send(Copy& copy) {
  Block& block = *copy.block;
  copy.mbarrier = block.started ? find_mbarrier(block, copy.barrier) : nullptr;
  if (copy.mbarrier == nullptr || !copy.mbarrier->fenced) {
    fail(std::string(name_of(copy.primitive)) + " at " + text(copy.place) + " reached " +
         text(block) + ", which " +
         (!block.started             ? "had not begun"
          : copy.mbarrier == nullptr ? "had not initialised the mbarrier"
                                     : "had not fenced its initialised mbarrier"));
  }
}

void use(MBarrierState& mbarrier, Primitive primitive, Place place) {
  mbarrier.used = mbarrier.phase;
  mbarrier.user = primitive;
  mbarrier.user_place = place;
}

void deliver_piece() {
  const Piece piece = take_random(s.pieces);
  Copy& copy = *piece.copy;
  if (copy.mbarrier == nullptr) {
    resolve_send(copy);
    use(*copy.mbarrier, copy.primitive, copy.place);
  }
  std::memcpy(copy.begin + piece.offset, copy.source + piece.offset, piece.bytes);
  copy.left -= piece.bytes;
  MBarrierState& mbarrier = *copy.mbarrier;
  add_bytes(mbarrier, -static_cast<int64_t>(piece.bytes), copy.primitive, copy.place);
  if (copy.left == 0) {
    s.copies.erase(std::find_if(s.copies.begin(), s.copies.end(),
                                [&](const auto& other) { return other.get() == &copy; }));
  }
  complete_phase_if_due(mbarrier);
}

// Chooses the warp to go on with; null where none can run.
Warp* draw_warp() {
  if (!s.unstarted.empty() && random_below(s.temper.starting) == 0) {
    start(*take_random(s.unstarted));
  }
  if (s.runnable.empty()) return nullptr;
  s.burst = 1 + random_below(s.temper.burst);
  if (s.temper.stall > 0 && s.blocks.size() > 1 && s.stall-- == 0) {
    s.stall = random_below(s.temper.stall);
    s.stalled = &s.blocks[random_below(static_cast<uint32_t>(s.blocks.size()))];
  }
  Warp* warp = nullptr;
  for (int tries = 0; tries < 4; ++tries) {
    warp = s.runnable[random_below(static_cast<uint32_t>(s.runnable.size()))];
    if (warp->block != s.stalled) break;
  }
  return warp;
}

// The thread that runs next; null where none ever will.
Thread* choose() {
  for (;;) {
    if (!s.pieces.empty() && s.delivery-- == 0) {
      s.delivery = random_below(s.temper.delivery);
      deliver_piece();
    }
    if (s.warp == nullptr || s.warp->ready == 0 || s.burst == 0) s.warp = draw_warp();
    if (s.warp != nullptr) break;
    const bool can_start = !s.unstarted.empty(), can_deliver = !s.pieces.empty();
    if (can_start && (!can_deliver || random_below(2) == 0)) {
      start(*take_random(s.unstarted));
    } else if (can_deliver) {
      deliver_piece();
    } else {
      return nullptr;
    }
  }
  --s.burst;
  Warp& warp = *s.warp;
  // The first ready lane from a random one on.
  const uint32_t from = random_below(kWarp);
  const uint32_t rotated = warp.ready >> from | warp.ready << (kWarp - from) % kWarp;
  const int lane = static_cast<int>((from + static_cast<uint32_t>(__builtin_ctz(rotated))) % kWarp);
  warp.ready &= ~(1u << lane);
  if (warp.ready == 0) {
    s.runnable[warp.position] = s.runnable.back();
    s.runnable[warp.position]->position = warp.position;
    s.runnable.pop_back();
  }
  return warp.threads[lane];
}

void set_current(Thread* thread) {
  s.thread = thread;
  current = thread;
}

// Lets others run until somebody makes this thread ready again.
void suspend() {
  Thread* self = s.thread;
  Thread* next = choose();
  if (next == self) return;
  set_current(next);
  Fiber::switch_between(self->fiber, next == nullptr ? s.main : next->fiber);
}

void suspend(Primitive primitive, Place place) {
  s.thread->primitive = primitive;
  s.thread->place = place;
  suspend();
}

// As if it had waited and been woken at once.
void pause(Primitive primitive, Place place) {
  make_ready(*s.thread);
  suspend(primitive, place);
}

void end_thread() {
  Thread& self = *s.thread;
  Warp& warp = *self.warp;
  Block& block = *warp.block;
  const auto fail_because = [&](const std::string& reason) {
    fail("thread " + std::to_string(self.index) + " of " + text(block) + " ended while " + reason);
  };
  if (self.arrived) fail_because("it was between cluster_arrive and cluster_wait");
  if (warp.shuffle != 0) {
    fail_because(threads_text(__builtin_popcount(warp.shuffle)) + " of its warp waited in " +
                 name_of(warp.shuffle_primitive) + " at " + text(warp.shuffle_place));
  }
  if (block.barrier_arrived > 0) {
    fail_because(threads_text(block.barrier_arrived) + " of its block waited in block_barrier at " +
                 text(block.barrier_place));
  }
  if (s.arrived > 0) {
    fail_because(threads_text(s.arrived) + " of its cluster had arrived in cluster_arrive at " +
                 text(s.arrive_place));
  }
  self.ended = true;
  ++warp.ended;
  ++s.ended;
  if (++block.ended == s.threads) end(block);
}

void thread_entry() {
  Fiber::entered(s.main_runs ? &s.main : nullptr);
  s.main_runs = false;
  Thread* self = s.thread;
  Thread* next = nullptr;
  try {
    s.body(s.parameters);
    end_thread();
    next = choose();
  } catch (...) {
    s.failure = std::current_exception();
    next = nullptr;
  }
  set_current(next);
  Fiber::leave(self->fiber, next == nullptr ? s.main : next->fiber);
}

Temper random_temper() {
  return {random_of({1u, 4u, 32u, 256u, 4096u}), random_of({1u, 8u, 128u}),
          random_of({1u, 16u, 256u, 4096u, 1u << 20}), random_of({0u, 64u, 1024u})};
}

// Runs the blocks from (x, y, z) on along x that form one cluster.
void run_cluster(int64_t x, int64_t y, int64_t z) {
  const auto size = static_cast<size_t>(grid.cluster_size);
  const auto threads = static_cast<size_t>(s.threads);
  const size_t warps = (threads + kWarp - 1) / kWarp;
  while (s.pool.size() < size * threads) {
    s.pool.push_back(std::make_unique<Thread>());
    s.thread_pointers.push_back(s.pool.back().get());
  }
  s.blocks.resize(size);
  s.unstarted.clear();
  s.runnable.clear();
  s.copies.clear();
  s.pieces.clear();
  s.cluster_waiting.clear();
  s.ended = s.arrived = 0;
  s.phase = 0;
  s.warp = nullptr;
  s.stalled = nullptr;
  s.failure = nullptr;
  s.temper = random_temper();
  s.delivery = random_below(s.temper.delivery);
  s.stall = 0;

  for (size_t rank = 0; rank < size; ++rank) {
    Block& block = s.blocks[rank];
    block.x = x + static_cast<int64_t>(rank);
    block.y = y;
    block.z = z;
    block.rank = static_cast<int>(rank);
    block.threads = s.thread_pointers.data() + rank * threads;
    block.started = false;
    block.ended = block.barrier_arrived = 0;
    block.mbarriers.clear();
    block.memory.resize(static_cast<size_t>(s.shared_bytes) + 2 * kMargin + 256);
    const auto margin = reinterpret_cast<uintptr_t>(block.memory.data()) + kMargin;
    block.shared = block.memory.data() + kMargin + (128 - margin % 256 + 256) % 256;
    block.warps.resize(warps);
    for (size_t w = 0; w < warps; ++w) {
      Warp& warp = block.warps[w];
      warp = Warp{};
      warp.block = &block;
      warp.threads = block.threads + w * kWarp;
      warp.lanes = static_cast<int>(std::min<size_t>(kWarp, threads - w * kWarp));
      for (int lane = 0; lane < warp.lanes; ++lane) {
        Thread& thread = *warp.threads[lane];
        thread.index = static_cast<int>(w) * kWarp + lane;
        thread.block = &block;
        thread.warp = &warp;
        thread.lane = lane;
        thread.ended = thread.arrived = false;
        thread.fiber.prepare(thread_entry);
      }
    }
    s.unstarted.push_back(&block);
  }

  start(*take_random(s.unstarted));
  if (Thread* next = choose()) {
    set_current(next);
    s.main_runs = true;
    Fiber::switch_between(s.main, next->fiber);
  }
  for (const Block& block : s.blocks) {
    if (block.started) protect_margins(block, false);
  }
  if (s.failure != nullptr) std::rethrow_exception(std::exchange(s.failure, nullptr));
  if (s.ended < static_cast<int>(size * threads)) report_deadlock();
}

// --- Launches ------------------------------------------------------------------------------------

constexpr const char* kInvalidConfiguration = "cudaErrorInvalidConfiguration";
constexpr const char* kInvalidValue = "cudaErrorInvalidValue";
constexpr const char* kInvalidClusterSize = "cudaErrorInvalidClusterSize";

[[noreturn]] void refuse(const char* code, const std::string& reason, const char* call) {
  throw cuda::CudaError(code, reason, call, __FILE__, __LINE__);
}

// What a driver refuses whatever the device holds.
void check_shape(const void* kernel, const cuda::Shape& shape, const char* call) {
  if (shape.x == 0 || shape.y == 0 || shape.z == 0) {
    refuse(kInvalidConfiguration, "a grid without blocks", call);
  }
  if (shape.x > 0x7FFFFFFFu || shape.y > 65535 || shape.z > 65535) {
    refuse(kInvalidConfiguration, "a grid beyond 2^31 - 1, 65535, 65535 blocks", call);
  }
  if (shape.threads <= 0 || shape.threads > 1024) {
    refuse(kInvalidConfiguration, std::to_string(shape.threads) + " threads in a block", call);
  }
  if (shape.shared_bytes < 0 || shape.cluster < 0) {
    refuse(kInvalidConfiguration, "negative sizes", call);
  }
  const auto allowed = s.allowed.find(kernel);
  const bool large = allowed != s.allowed.end();
  if (shape.shared_bytes >
      (large ? std::max(allowed->second, kSharedBytesByDefault) : kSharedBytesByDefault)) {
    refuse(kInvalidValue,
           std::to_string(shape.shared_bytes) +
               " bytes of shared memory, more than allow_large_clusters has allowed",
           call);
  }
  if (shape.cluster == 0) return;
  if (shape.cluster > 16 || (shape.cluster > kClusterByDefault && !large)) {
    refuse(kInvalidClusterSize,
           "clusters of " + std::to_string(shape.cluster) +
               " blocks; 8 without allow_large_clusters, 16 with it",
           call);
  }
  if (shape.x % static_cast<unsigned>(shape.cluster) != 0) {
    refuse(kInvalidClusterSize,
           std::to_string(shape.x) + " blocks do not divide into clusters of " +
               std::to_string(shape.cluster),
           call);
  }
}

// Of a multiprocessor's shared memory the system keeps some for each block.
constexpr int kReservedBytes = 1024;

bool fits(const cuda::Shape& shape) {
  return shape.shared_bytes <= s.device.shared_bytes - kReservedBytes &&
         (shape.cluster == 0 || s.device.architecture >= 90);
}

// --- Primitives ----------------------------------------------------------------------------------

void require_sm90(Primitive primitive, Place place) {
  if (s.device.architecture < 90) {
    fail(primitive, place,
         "needs sm_90, the device is sm_" + std::to_string(s.device.architecture));
  }
}

bool in_shared(const BlockIdentity& block, const void* p, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(block.shared);
  const auto address = reinterpret_cast<uintptr_t>(p);
  const auto size = static_cast<size_t>(s.shared_bytes);
  return address >= begin && bytes <= size && address - begin <= size - bytes;
}

// The word of an initialised mbarrier is this and its index.
constexpr uint64_t kMBarrierMark = uint64_t{0x6D626172} << 32;

MBarrierState* find_mbarrier(Block& block, uint64_t* barrier) {
  const uint64_t index = *barrier ^ kMBarrierMark;
  if (index >= block.mbarriers.size() || block.mbarriers[index].address != barrier) return nullptr;
  return &block.mbarriers[index];
}

MBarrierState& mbarrier_at(uint64_t* barrier, Primitive primitive, Place place) {
  require_sm90(primitive, place);
  Block& block = *s.thread->warp->block;
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0 || !in_shared(block, barrier, 8)) {
    fail(primitive, place, "the mbarrier is misaligned or outside the block's shared memory");
  }
  MBarrierState* mbarrier = find_mbarrier(block, barrier);
  if (mbarrier == nullptr) fail(primitive, place, "the mbarrier is not initialised");
  return *mbarrier;
}

}  // namespace

const char* name_of(Primitive primitive) {
  switch (primitive) {
    case Primitive::kShuffleXor:
      return "shuffle_xor";
    case Primitive::kShuffleUp:
      return "shuffle_up";
    case Primitive::kBlockBarrier:
      return "block_barrier";
    case Primitive::kClusterArrive:
      return "cluster_arrive";
    case Primitive::kClusterWait:
      return "cluster_wait";
    case Primitive::kFenceMBarrierInit:
      return "fence_mbarrier_init";
    case Primitive::kMBarrierInit:
      return "mbarrier_init";
    case Primitive::kMBarrierArriveExpecting:
      return "mbarrier_arrive_expecting";
    case Primitive::kMBarrierWait:
      return "mbarrier_wait";
    case Primitive::kBulkLoad:
      return "bulk_load";
    case Primitive::kSendInCluster:
      return "send_in_cluster";
    case Primitive::kLoad:
      return "load";
    case Primitive::kStore:
      return "store";
  }
  return "?";
}

void check_access(uintptr_t address, size_t bytes, size_t alignment, Primitive primitive,
                  Place place) {
  const std::string what = std::to_string(bytes) + " bytes at " + std::to_string(address);
  if (address % alignment != 0) {
    fail(primitive, place, what + " are not aligned to " + std::to_string(alignment));
  }
  const bool writes = primitive == Primitive::kStore;
  const Buffer* nearest = nullptr;
  uintptr_t distance = UINTPTR_MAX;
  const auto fitting = [&](const Buffer& buffer) {
    if (address >= buffer.begin && address + bytes <= buffer.end && (!writes || buffer.writable)) {
      recent_ranges[(address >> 12) % kRecentRanges] = {buffer.begin, buffer.end, buffer.writable};
      return true;
    }
    const uintptr_t apart = address < buffer.begin ? buffer.begin - address
                            : address < buffer.end ? 0
                                                   : address - buffer.end + 1;
    if (apart < distance) {
      distance = apart;
      nearest = &buffer;
    }
    return false;
  };
  // Buffers rarely overlap, so that the last one that begins before it is almost always the one.
  auto after = std::upper_bound(s.buffers.begin(), s.buffers.end(), address,
                                [](uintptr_t a, const Buffer& buffer) { return a < buffer.begin; });
  if (after != s.buffers.begin() && fitting(*std::prev(after))) return;
  for (const Buffer& buffer : s.buffers) {
    if (fitting(buffer)) return;
  }
  if (nearest == nullptr) fail(primitive, place, what + ", and no buffer is declared");
  const auto offset = static_cast<int64_t>(address - nearest->begin);
  const bool inside = address >= nearest->begin && address + bytes <= nearest->end;
  fail(primitive, place,
       what +
           (inside ? " are in a buffer that is not writable: byte "
                   : " are in no buffer; the nearest: byte ") +
           std::to_string(offset) + " of '" + nearest->name + "', which has " +
           std::to_string(nearest->end - nearest->begin) + " bytes");
}

void access_uniform(const void* p, size_t bytes, size_t alignment, Place place) {
  const int64_t before = counters->bytes_read;
  access(p, bytes, alignment, Primitive::kLoad, place);
  auto& all = s.thread->warp->uniform_reads;
  auto reads = std::find_if(all.begin(), all.end(),
                            [&](const UniformReads& other) { return same(other.place, place); });
  if (reads == all.end()) reads = all.insert(all.end(), UniformReads{place, {}, {}});
  const auto address = reinterpret_cast<uintptr_t>(p);
  const size_t call = reads->calls[s.thread->lane]++;
  if (call == reads->addresses.size()) {
    reads->addresses.push_back(address);
    return;
  }
  if (reads->addresses[call] != address) {
    fail(Primitive::kLoad, place, "another address than in other lanes, yet load_uniform");
  }
  counters->bytes_read = before;
}

uint32_t shuffle(uint32_t value, int operand, Primitive primitive, Place place) {
  Thread& self = *s.thread;
  Warp& warp = *self.warp;
  if (warp.lanes < kWarp) {
    fail(primitive, place, "its warp has " + std::to_string(warp.lanes) + " threads");
  }
  if (warp.ended > 0) {
    fail(primitive, place, "diverged, " + threads_text(warp.ended) + " of its warp ended");
  }
  if (primitive == Primitive::kShuffleXor ? operand < 0 || operand >= kWarp : operand < 0) {
    fail(primitive, place, "an operand of " + std::to_string(operand));
  }
  if (warp.shuffle == 0) {
    warp.shuffle_primitive = primitive;
    warp.shuffle_place = place;
  } else if (warp.shuffle_primitive != primitive || !same(warp.shuffle_place, place)) {
    fail(primitive, place,
         "diverged, " + threads_text(__builtin_popcount(warp.shuffle)) + " of its warp waited in " +
             name_of(warp.shuffle_primitive) + " at " + text(warp.shuffle_place));
  }
  warp.values[self.lane] = value;
  warp.operands[self.lane] = operand;
  warp.shuffle |= 1u << self.lane;
  if (warp.shuffle == 0xFFFFFFFFu) {
    warp.shuffle = 0;
    uint32_t values[kWarp];
    std::memcpy(values, warp.values, sizeof(values));
    for (int lane = 0; lane < kWarp; ++lane) {
      const int by = warp.operands[lane];
      const int source = primitive == Primitive::kShuffleXor ? lane ^ by : lane - by;
      if (source >= 0) warp.values[lane] = values[source];
    }
    make_ready(warp, 0xFFFFFFFFu);
  }
  suspend(primitive, place);
  return warp.values[self.lane];
}

void block_barrier(Place place) {
  if (skips(Primitive::kBlockBarrier, place)) return;
  Block& block = *s.thread->warp->block;
  if (block.ended > 0) {
    fail(Primitive::kBlockBarrier, place,
         "diverged, " + threads_text(block.ended) + " of its block ended");
  }
  if (block.barrier_arrived == 0) {
    block.barrier_place = place;
  } else if (!same(block.barrier_place, place)) {
    fail(Primitive::kBlockBarrier, place,
         "diverged, " + threads_text(block.barrier_arrived) + " of its block waited at " +
             text(block.barrier_place));
  }
  if (++block.barrier_arrived == s.threads) {
    block.barrier_arrived = 0;
    ++counters->barriers;
    for (Warp& warp : block.warps) make_ready(warp, all_lanes(warp));
  }
  suspend(Primitive::kBlockBarrier, place);
}

void cluster_arrive(Place place) {
  if (skips(Primitive::kClusterArrive, place)) return;
  require_sm90(Primitive::kClusterArrive, place);
  Thread& self = *s.thread;
  if (self.arrived) {
    fail(Primitive::kClusterArrive, place, "a second one without a cluster_wait between them");
  }
  if (s.ended > 0) {
    fail(Primitive::kClusterArrive, place,
         "diverged, " + threads_text(s.ended) + " of its cluster ended");
  }
  self.arrived = true;
  self.arrived_phase = s.phase;
  if (s.arrived == 0) s.arrive_place = place;
  if (++s.arrived == s.threads * grid.cluster_size) {
    s.arrived = 0;
    ++s.phase;
    ++counters->cluster_barriers;
    for (Thread* thread : s.cluster_waiting) make_ready(*thread);
    s.cluster_waiting.clear();
  }
}

void cluster_wait(Place place) {
  if (skips(Primitive::kClusterWait, place)) return;
  require_sm90(Primitive::kClusterWait, place);
  Thread& self = *s.thread;
  if (!self.arrived) fail(Primitive::kClusterWait, place, "no cluster_arrive came before");
  if (s.phase > self.arrived_phase) {
    pause(Primitive::kClusterWait, place);
  } else {
    s.cluster_waiting.push_back(&self);
    suspend(Primitive::kClusterWait, place);
  }
  self.arrived = false;
}

void mbarrier_init(uint64_t* barrier, int arrivals, Place place) {
  require_sm90(Primitive::kMBarrierInit, place);
  Block& block = *s.thread->warp->block;
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0 || !in_shared(block, barrier, 8)) {
    fail(Primitive::kMBarrierInit, place,
         "the mbarrier is misaligned or outside the block's shared memory");
  }
  if (arrivals < 1 || arrivals > kTransactionLimit) {
    fail(Primitive::kMBarrierInit, place, std::to_string(arrivals) + " arrivals");
  }
  for (const MBarrierState& other : block.mbarriers) {
    if (other.address == barrier) {
      fail(Primitive::kMBarrierInit, place, "the mbarrier is initialised already");
    }
  }
  *barrier = kMBarrierMark | block.mbarriers.size();
  block.mbarriers.emplace_back(barrier, s.thread, arrivals);
}

void fence_mbarrier_init(Place place) {
  if (skips(Primitive::kFenceMBarrierInit, place)) return;
  require_sm90(Primitive::kFenceMBarrierInit, place);
  for (MBarrierState& mbarrier : s.thread->warp->block->mbarriers) {
    if (mbarrier.initialiser == s.thread) mbarrier.fenced = true;
  }
}

void mbarrier_arrive_expecting(uint64_t* barrier, uint32_t bytes, Place place) {
  if (skips(Primitive::kMBarrierArriveExpecting, place)) return;
  MBarrierState& mbarrier = mbarrier_at(barrier, Primitive::kMBarrierArriveExpecting, place);
  if (mbarrier.pending == 0) {
    fail(Primitive::kMBarrierArriveExpecting, place, "one arrival more than the phase has");
  }
  add_bytes(mbarrier, bytes, Primitive::kMBarrierArriveExpecting, place);
  --mbarrier.pending;
  complete_phase_if_due(mbarrier);
}

void mbarrier_wait(uint64_t* barrier, uint32_t parity, Place place) {
  if (skips(Primitive::kMBarrierWait, place)) return;
  MBarrierState& mbarrier = mbarrier_at(barrier, Primitive::kMBarrierWait, place);
  if (parity > 1) {
    fail(Primitive::kMBarrierWait, place, "a parity of " + std::to_string(parity));
  }
  Thread& self = *s.thread;
  // Of the phase that runs the parity differs once the one before, which was meant, is complete.
  // Another look after every wake-up: a thread that comes late to the next phase misses this one.
  if ((mbarrier.phase & 1) != static_cast<int64_t>(parity)) {
    mbarrier.seen = mbarrier.phase;
    pause(Primitive::kMBarrierWait, place);
    return;
  }
  self.mbarrier = &mbarrier;
  do {
    mbarrier.waiting.push_back(&self);
    suspend(Primitive::kMBarrierWait, place);
  } while ((mbarrier.phase & 1) == static_cast<int64_t>(parity));
  mbarrier.seen = mbarrier.phase;
}

void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier, Place place) {
  MBarrierState& mbarrier = mbarrier_at(barrier, Primitive::kBulkLoad, place);
  Block& block = *s.thread->warp->block;
  if (!mbarrier.fenced) {
    fail(Primitive::kBulkLoad, place,
         "no fence_mbarrier_init came between the mbarrier's initialisation and this");
  }
  const auto to = reinterpret_cast<uintptr_t>(shared);
  const auto from = reinterpret_cast<uintptr_t>(global);
  if (bytes == 0 || bytes % 16 != 0) {
    fail(Primitive::kBulkLoad, place,
         std::to_string(bytes) + " bytes, not a positive multiple of 16");
  }
  if (to % 16 != 0) fail(Primitive::kBulkLoad, place, "the destination is not aligned to 16");
  if (!in_shared(block, shared, bytes)) {
    fail(Primitive::kBulkLoad, place,
         std::to_string(bytes) + " bytes to byte " +
             std::to_string(static_cast<char*>(shared) - block.shared) + " of " +
             std::to_string(s.shared_bytes) + " of shared memory");
  }
  check_access(from, bytes, 16, Primitive::kBulkLoad, place);
  counters->bytes_read += bytes;
  char* begin = static_cast<char*>(shared);
  for (const auto& other : s.copies) {
    if (begin < other->begin + other->bytes && other->begin < begin + bytes) {
      fail(Primitive::kBulkLoad, place,
           "the destination is that of the copy in flight from " + text(other->place));
    }
  }
  use(mbarrier, Primitive::kBulkLoad, place);
  std::memset(shared, kPoison, bytes);
  s.copies.push_back(std::make_unique<Copy>(Copy{&block,
                                                 barrier,
                                                 &mbarrier,
                                                 begin,
                                                 static_cast<const char*>(global),
                                                 bytes,
                                                 bytes,
                                                 Primitive::kBulkLoad,
                                                 place,
                                                 {}}));
  for (uint32_t offset = 0; offset < bytes;) {
    const uint32_t piece = std::min(bytes - offset, 16 * (1 + random_below(256)));
    s.pieces.push_back({s.copies.back().get(), offset, piece});
    offset += piece;
  }
}

void send_in_cluster(void* p, int rank, const void* value, uint64_t* barrier, Place place) {
  constexpr Primitive kSend = Primitive::kSendInCluster;
  require_sm90(kSend, place);
  const Block& block = *s.thread->warp->block;
  if (rank < 0 || rank >= grid.cluster_size) {
    fail(kSend, place,
         "rank " + std::to_string(rank) + " in a cluster of " + std::to_string(grid.cluster_size));
  }
  if (reinterpret_cast<uintptr_t>(p) % kSentBytes != 0 || !in_shared(block, p, kSentBytes)) {
    fail(kSend, place, "the address is misaligned or outside the block's shared memory");
  }
  if (reinterpret_cast<uintptr_t>(barrier) % 8 != 0 || !in_shared(block, barrier, 8)) {
    fail(kSend, place, "the mbarrier is misaligned or outside the block's shared memory");
  }
  Block& target = s.blocks[static_cast<size_t>(rank)];
  if (target.ended == s.threads) fail(kSend, place, text(target) + " had ended");
  const auto there = [&](const void* here) {
    return target.shared + (static_cast<const char*>(here) - block.shared);
  };
  // Until it lands, nobody may read there.
  if (target.started) std::memset(there(p), kPoison, kSentBytes);
  s.copies.push_back(std::make_unique<Copy>(Copy{&target,
                                                 reinterpret_cast<uint64_t*>(there(barrier)),
                                                 nullptr,
                                                 there(p),
                                                 nullptr,
                                                 kSentBytes,
                                                 kSentBytes,
                                                 kSend,
                                                 place,
                                                 {}}));
  Copy& copy = *s.copies.back();
  std::memcpy(copy.value, value, kSentBytes);
  copy.source = reinterpret_cast<const char*>(copy.value);
  s.pieces.push_back({&copy, 0, kSentBytes});
}

namespace {

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}
float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}
constexpr uint32_t kExponent = 0x7F800000u;
constexpr uint32_t kCanonicalNaN = 0x7FFFFFFFu;

// One ulp up for a quarter of the arguments, one down for another. Subnormals become zeros.
float disturb(float y, float x) {
  uint32_t bits = bits_of(y);
  if (y != 0 && (bits & kExponent) != kExponent) {
    const uint32_t hash = bits_of(x) * 0x9E3779B1u >> 30;
    bits += hash == 0 ? 1u : hash == 1 ? ~0u : 0u;
  }
  if ((bits & kExponent) == 0) bits &= 0x80000000u;
  return float_of(bits);
}

}  // namespace

float exp2_approximate(float x) {
  if (x != x) return float_of(kCanonicalNaN);
  if ((bits_of(x) & kExponent) == 0) return 1.f;
  return disturb(static_cast<float>(std::exp2(static_cast<double>(x))), x);
}

float reciprocal_approximate(float x) {
  if (x != x) return float_of(kCanonicalNaN);
  if ((bits_of(x) & kExponent) == 0) return float_of((bits_of(x) & 0x80000000u) | kExponent);
  return disturb(1.f / x, x);
}

void run(const char* name, const void* kernel, const cuda::Shape& shape,
         void (*body)(const void* parameters), const void* parameters) {
  const std::lock_guard<std::mutex> lock(s.turn);
  constexpr const char* kCall = "cudaLaunchKernelEx";
  check_shape(kernel, shape, kCall);
  if (!fits(shape)) {
    refuse(kInvalidConfiguration,
           std::to_string(shape.shared_bytes) + " bytes of shared memory and clusters of " +
               std::to_string(shape.cluster) + " on this device",
           kCall);
  }
  s.name = name;
  s.clustered = shape.cluster > 0;
  s.threads = shape.threads;
  s.shared_bytes = shape.shared_bytes;
  s.body = body;
  s.parameters = parameters;
  counters = &s.counters[name];
  ++counters->launches;
  grid.x = shape.x;
  grid.cluster_size = std::max(shape.cluster, 1);

  const int64_t along = grid.x / grid.cluster_size;
  std::vector<int64_t> order(static_cast<size_t>(along * shape.y * shape.z));
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = static_cast<int64_t>(i);
    std::swap(order[i], order[random_below(static_cast<uint32_t>(i) + 1)]);
  }
  for (const int64_t i : order) {
    run_cluster(i % along * grid.cluster_size, i / along % shape.y, i / along / shape.y);
  }
}

void allow_large_clusters(const void* kernel, int shared_bytes) {
  const std::lock_guard<std::mutex> lock(s.turn);
  const int most = s.device.shared_bytes - kReservedBytes;
  if (shared_bytes < 0 || shared_bytes > most) {
    refuse(kInvalidValue,
           std::to_string(shared_bytes) + " bytes of shared memory, a block of this device has " +
               std::to_string(most),
           "cudaFuncSetAttribute");
  }
  s.allowed[kernel] = shared_bytes;
}

int max_active_clusters(const void* kernel, const cuda::Shape& shape) {
  const std::lock_guard<std::mutex> lock(s.turn);
  check_shape(kernel, shape, "cudaOccupancyMaxActiveClusters");
  return fits(shape) ? s.max_clusters : 0;
}

void set_seed(uint64_t seed) {
  const std::lock_guard<std::mutex> lock(s.turn);
  // Neighbouring seeds must not begin alike, and the generator never leaves 0.
  seed = (seed + 1) * 0x9E3779B97F4A7C15u;
  seed = (seed ^ seed >> 30) * 0xBF58476D1CE4E5B9u;
  s.random = (seed ^ seed >> 27) | 1;
}

const cuda::Device& device() { return s.device; }
void set_device(int architecture, int multiprocessors, int shared_bytes, int64_t l2_bytes) {
  const std::lock_guard<std::mutex> lock(s.turn);
  s.device = {s.device.index + 1, architecture, multiprocessors, shared_bytes, l2_bytes};
  s.allowed.clear();
}
void set_max_clusters(int clusters) {
  const std::lock_guard<std::mutex> lock(s.turn);
  ++s.device.index;
  s.allowed.clear();
  s.max_clusters = clusters;
}

void allow(uintptr_t address, size_t bytes, bool writable, std::string name) {
  const std::lock_guard<std::mutex> lock(s.turn);
  if (bytes == 0) return;
  Buffer buffer{address, address + bytes, writable, std::move(name)};
  const auto after =
      std::upper_bound(s.buffers.begin(), s.buffers.end(), address,
                       [](uintptr_t a, const Buffer& other) { return a < other.begin; });
  s.buffers.insert(after, std::move(buffer));
}
void forget() {
  const std::lock_guard<std::mutex> lock(s.turn);
  s.buffers.clear();
  std::fill(std::begin(recent_ranges), std::end(recent_ranges), Range{});
}

std::vector<KernelCounters> all_counters() {
  const std::lock_guard<std::mutex> lock(s.turn);
  std::vector<KernelCounters> result;
  for (const auto& [kernel, values] : s.counters) result.push_back({kernel, values});
  return result;
}
void reset_counters() {
  const std::lock_guard<std::mutex> lock(s.turn);
  s.counters.clear();
}

std::vector<Site> sites() {
  const std::lock_guard<std::mutex> lock(s.turn);
  std::vector<Site> result;
  std::set<std::tuple<std::string, int, Primitive>> known;  // a header's name has many addresses
  for (const auto& [key, skipped] : executed_sites) {
    const std::string file = basename(key.file);
    if (known.emplace(file, key.line, key.primitive).second) {
      result.push_back({file, key.line, key.primitive});
    }
  }
  return result;
}
void skip(const std::vector<std::string>& file_and_line) {
  const std::lock_guard<std::mutex> lock(s.turn);
  skipped_sites = {file_and_line.begin(), file_and_line.end()};
  for (auto& [key, skipped] : executed_sites) {
    skipped = skipped_sites.count(text(Place{key.file, key.line})) != 0;
  }
}

}  // namespace dspark::emulation
