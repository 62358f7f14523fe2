// The Python module emulated_selftest: kernels that are right, and kernels that are wrong in one
// respect each, for the tests of the emulator. They all have the same parameters, so that one
// function launches any of them by its name. The tests find the lines marked `at:`.
#include <primitives.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <runtime.h>

#include <map>
#include <string>
#include <vector>

#include "controls.h"

namespace dspark::cuda {
namespace {

// What a kernel gets: `in` and `out` point to whatever it expects, `n` counts it.
using Kernel = void (*)(const float* in, float* out, int n);

__device__ float* shared_floats() { return reinterpret_cast<float*>(shared_memory()); }
__device__ float warp_sum(float x) {
  for (int mask = kWarp / 2; mask > 0; mask /= 2) x += shuffle_xor(x, mask);
  return x;
}

// --- Blocks and warps ----------------------------------------------------------------------------

// Each block reverses its n elements.
__global__ void reverse_kernel(const float* in, float* out, int n) {
  float* shared = shared_floats();
  const int64_t first = block_x() * n;
  shared[thread_index()] = load(in + first + thread_index());
  block_barrier();
  store(out + first + thread_index(), shared[n - 1 - thread_index()]);
}

__global__ void warp_sum_kernel(const float* in, float* out, int) {
  store(out + thread_index(), warp_sum(load(in + thread_index())));
}

__global__ void prefix_sum_kernel(const float* in, float* out, int) {
  float x = load(in + thread_index());
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const float below = shuffle_up(x, distance);
    if (thread_index() >= distance) x += below;
  }
  store(out + thread_index(), x);
}

__global__ void diverged_shuffle_kernel(const float*, float*, int) {
  if (thread_index() % 2 == 0) {
    shuffle_xor(0, 1);  // at: even lanes
  } else {
    shuffle_xor(0, 1);  // at: odd lanes
  }
}
__global__ void ended_lane_kernel(const float*, float*, int) {
  if (thread_index() == 5) return;
  shuffle_xor(0, 1);  // at: other lanes
}
__global__ void diverged_barrier_kernel(const float*, float*, int) {
  if (thread_index() < kWarp) {
    block_barrier();  // at: first warp
  } else {
    block_barrier();  // at: other warps
  }
}
__global__ void ended_thread_kernel(const float*, float*, int) {
  if (thread_index() == 5) return;
  block_barrier();  // at: other threads
}
__global__ void mixed_wait_kernel(const float*, float*, int) {
  if (thread_index() % 2 == 0) {
    block_barrier();  // at: even threads
  } else {
    shuffle_xor(0, 1);  // at: odd threads
  }
}

// --- Clusters ------------------------------------------------------------------------------------

// Where blocks send to each other: a slot, and the mbarrier that counts what lands.
struct Mailbox {
  Vector* slot;
  MBarrier* arrived;
};
__device__ Mailbox mailbox() {
  auto* slot = reinterpret_cast<Vector*>(shared_memory());
  return {slot, reinterpret_cast<MBarrier*>(slot + 1)};
}
__device__ Vector vector_of(float x) { return {{bits_of(x), 0, 0, 0}}; }

// Every block gives n to the next; out[block] is what it got.
__global__ void neighbour_kernel(const float*, float* out, int n) {
  const Mailbox own = mailbox();
  if (thread_index() == 0) {
    mbarrier_init(own.arrived, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expecting(own.arrived, sizeof(Vector));
  }
  cluster_arrive();
  cluster_wait();
  if (thread_index() == 0) {
    const int next = (cluster_rank() + 1) % cluster_size();
    send_in_cluster(own.slot, next, vector_of(static_cast<float>(n)), own.arrived);
  }
  mbarrier_wait(own.arrived, 0);
  if (thread_index() == 0) store(out + block_x(), float_of(own.slot->words[0]));
}
// Sends to itself and does not wait.
__global__ void send_early_kernel(const float*, float* out, int) {
  const Mailbox own = mailbox();
  own.slot->words[0] = bits_of(0.f);
  mbarrier_init(own.arrived, 1);
  fence_mbarrier_init();
  mbarrier_arrive_expecting(own.arrived, sizeof(Vector));
  send_in_cluster(own.slot, 0, vector_of(1.f), own.arrived);
  store(out, float_of(own.slot->words[0]));
  mbarrier_wait(own.arrived, 0);
  store(out + 1, float_of(own.slot->words[0]));
}
__global__ void send_to_ended_kernel(const float*, float*, int) {
  cluster_arrive();
  cluster_wait();
  const Mailbox own = mailbox();
  if (cluster_rank() == 1) send_in_cluster(own.slot, 0, Vector{}, own.arrived);
}
__global__ void send_outside_kernel(const float*, float*, int n) {
  send_in_cluster(mailbox().slot + n, 0, Vector{}, mailbox().arrived);
}
__global__ void send_beyond_cluster_kernel(const float*, float*, int n) {
  send_in_cluster(mailbox().slot, n, Vector{}, mailbox().arrived);
}
// n says how far the mbarrier comes: nothing, initialised, fenced.
__global__ void send_unprepared_kernel(const float*, float*, int n) {
  if (n > 0) mbarrier_init(mailbox().arrived, 1);
  if (n > 1) fence_mbarrier_init();
  send_in_cluster(mailbox().slot, 0, Vector{}, mailbox().arrived);  // at: send
  block_barrier();
}
__global__ void two_arrivals_kernel(const float*, float*, int) {
  cluster_arrive();
  cluster_arrive();  // at: second arrival
}
__global__ void no_arrival_kernel(const float*, float*, int) {
  cluster_wait();  // at: wait without arrival
}
__global__ void no_wait_kernel(const float*, float*, int) { cluster_arrive(); }
__global__ void ended_block_kernel(const float*, float*, int) {
  if (cluster_rank() == 0) return;
  cluster_arrive();  // at: other blocks
  cluster_wait();
}
__global__ void cluster_deadlock_kernel(const float*, float*, int) {
  if (cluster_rank() == 0) {
    cluster_arrive();
    cluster_wait();  // at: wait of a whole block
  } else if (thread_index() > 0) {
    block_barrier();  // at: barrier without thread 0
  } else {
    cluster_arrive();
    cluster_wait();  // at: wait of thread 0
  }
}

// --- Asynchronous copies -------------------------------------------------------------------------

// The mbarrier in the last 16 of the block's bytes, n floats in front of it.
struct Landing {
  float* data;
  MBarrier* loaded;
};
__device__ Landing landing(int n) {
  return {shared_floats(), reinterpret_cast<MBarrier*>(shared_floats() + n)};
}
__device__ void initialise_alone(MBarrier* loaded) {
  if (thread_index() != 0) return;
  mbarrier_init(loaded, 1);
  fence_mbarrier_init();
}
__device__ void initialise(MBarrier* loaded) {
  initialise_alone(loaded);
  block_barrier();
}
__device__ uint32_t bytes_of(int n) { return static_cast<uint32_t>(n) * 4u; }

__global__ void copy_kernel(const float* in, float* out, int n) {
  const Landing at = landing(n);
  initialise(at.loaded);
  if (thread_index() == 0) {
    mbarrier_arrive_expecting(at.loaded, bytes_of(n));
    bulk_load(at.data, in, bytes_of(n), at.loaded);
  }
  mbarrier_wait(at.loaded, 0);
  for (int i = thread_index(); i < n; i += kWarp) store(out + i, at.data[i]);
}
__global__ void copy_early_kernel(const float* in, float* out, int n) {
  const Landing at = landing(n);
  initialise(at.loaded);
  if (thread_index() == 0) {
    mbarrier_arrive_expecting(at.loaded, bytes_of(n));
    bulk_load(at.data, in, bytes_of(n), at.loaded);
    for (int i = 0; i < n; ++i) store(out + i, at.data[i]);
    mbarrier_wait(at.loaded, 0);
  }
}
__global__ void copy_no_fence_kernel(const float* in, float*, int n) {
  const Landing at = landing(n);
  if (thread_index() != 0) return;
  mbarrier_init(at.loaded, 1);
  bulk_load(at.data, in, bytes_of(n), at.loaded);
}
__global__ void copy_no_init_kernel(const float* in, float*, int n) {
  const Landing at = landing(n);
  bulk_load(at.data, in, bytes_of(n), at.loaded);
}
__global__ void copy_no_wait_kernel(const float* in, float*, int n) {
  const Landing at = landing(n);
  initialise(at.loaded);
  if (thread_index() == 0) {
    mbarrier_arrive_expecting(at.loaded, bytes_of(n));
    bulk_load(at.data, in, bytes_of(n), at.loaded);  // at: abandoned copy
  }
}
__global__ void copy_short_kernel(const float* in, float*, int n) {
  const Landing at = landing(n);
  initialise(at.loaded);
  if (thread_index() == 0) {
    mbarrier_arrive_expecting(at.loaded, bytes_of(n));
    bulk_load(at.data, in, bytes_of(n) - 16, at.loaded);
  }
  mbarrier_wait(at.loaded, 0);  // at: wait for 16 more bytes
}
__global__ void copy_twice_kernel(const float* in, float*, int n) {
  const Landing at = landing(n);
  initialise(at.loaded);
  if (thread_index() == 0) {
    bulk_load(at.data, in, bytes_of(n), at.loaded);  // at: first copy
    bulk_load(at.data, in, bytes_of(n), at.loaded);
  }
}
__global__ void copy_size_kernel(const float* in, float*, int n) {
  const Landing at = landing(64);
  initialise(at.loaded);
  if (thread_index() == 0) bulk_load(at.data, in, static_cast<uint32_t>(n), at.loaded);
}
__global__ void copy_from_kernel(const float* in, float*, int n) {
  const Landing at = landing(64);
  initialise(at.loaded);
  if (thread_index() == 0) bulk_load(at.data, in + n, 64, at.loaded);
}
__global__ void copy_to_kernel(const float* in, float*, int n) {
  const Landing at = landing(64);
  initialise(at.loaded);
  if (thread_index() == 0) bulk_load(at.data + n, in, 64, at.loaded);
}
__global__ void expect_too_much_kernel(const float*, float*, int n) {
  const Landing at = landing(64);
  initialise(at.loaded);
  if (thread_index() == 0) mbarrier_arrive_expecting(at.loaded, static_cast<uint32_t>(n));
}
__global__ void arrive_too_often_kernel(const float*, float*, int) {
  const Landing at = landing(64);
  initialise(at.loaded);
  if (thread_index() == 0) {
    mbarrier_arrive_expecting(at.loaded, 16);
    mbarrier_arrive_expecting(at.loaded, 16);
  }
}
__global__ void init_twice_kernel(const float*, float*, int) {
  const Landing at = landing(64);
  if (thread_index() == 0) mbarrier_init(at.loaded, 1);
  if (thread_index() == 0) mbarrier_init(at.loaded, 1);
}
// Which waits return when nothing has completed, n phases have, and so on.
__global__ void phases_kernel(const float*, float*, int n) {
  const Landing at = landing(64);
  initialise(at.loaded);
  mbarrier_wait(at.loaded, 1);  // of the phase before the first: complete
  for (uint32_t phase = 0; phase < 5; ++phase) {
    block_barrier();
    if (thread_index() == 0) mbarrier_arrive_expecting(at.loaded, 0);
    mbarrier_wait(at.loaded, phase % 2);
  }
  if (n > 0) mbarrier_wait(at.loaded, 1);  // at: wait for the sixth phase
}

// --- Memory --------------------------------------------------------------------------------------

__global__ void load_kernel(const float* in, float*, int n) {
  load(in + n);  // at: load
}
__global__ void load_vector_kernel(const float* in, float*, int n) {
  load(reinterpret_cast<const Vector*>(in + n));  // at: load of a vector
}
__global__ void store_kernel(const float*, float* out, int n) {
  store(out + n, 1.f);  // at: store
}
__global__ void write_shared_kernel(const float*, float*, int n) { shared_floats()[n] = 1.f; }
__global__ void unwritten_kernel(const float*, float* out, int n) {
  store(out, shared_floats()[0]);
  float local[64];
  // The index hides from the compiler that nothing was written.
  local[n % 64] = 1.f;
  store(out + 1, local[(n + 1) % 64]);
}
__global__ void count_kernel(const float* in, float* out, int) {
  load(in + thread_index());
  load(reinterpret_cast<const Vector*>(in) + thread_index());
  store(out + thread_index(), exp2_approximate(0.5f));
  store_streaming(reinterpret_cast<Vector*>(out) + thread_index(), Vector{});
  if (thread_index() < 3) exp2_approximate(0.f);
  block_barrier();
  block_barrier();
}

// Twice the address of the warp, but in lane n of the first one the next.
__global__ void uniform_kernel(const float* in, float*, int n) {
  const float* p = in + thread_index() / kWarp;
  for (int i = 0; i < 2; ++i) {
    load_uniform(p + (thread_index() == n ? 1 : 0));  // at: uniform load
  }
}

// --- All of it -----------------------------------------------------------------------------------

constexpr int kRows = 8;

// out[row] is the sum of a row of n columns: persistent clusters whose blocks each take a slice,
// the next row's copy under way while this one's parts are added. With a single mbarrier for the
// exchanges a part of the next row can be counted for one of this row that is still on its way.
template <int kBarriers>
__global__ void row_sums_kernel(const float* in, float* out, int n) {
  const int columns = n / cluster_size();
  const Landing at = landing(columns);
  // Of each row's parity, from every warp of the cluster.
  auto* parts = reinterpret_cast<Vector*>(at.loaded + 4);
  constexpr int kWarps = 4;
  const int warp = thread_index() / kWarp, lane = thread_index() % kWarp;
  const auto request = [&](int row) {
    if (thread_index() != 0 || row >= kRows) return;
    mbarrier_arrive_expecting(at.loaded, bytes_of(columns));
    bulk_load(at.data, in + int64_t{row} * n + cluster_rank() * columns, bytes_of(columns),
              at.loaded);
  };
  if (thread_index() == 0) {
    for (int i = 0; i < 1 + kBarriers; ++i) mbarrier_init(at.loaded + i, 1);
    fence_mbarrier_init();
  }
  request(cluster_index());
  cluster_arrive();
  cluster_wait();
  int turn = 0;
  for (int row = cluster_index(); row < kRows; row += cluster_count(), ++turn) {
    MBarrier* exchanged = at.loaded + 1 + turn % kBarriers;
    if (thread_index() == 0) {
      mbarrier_arrive_expecting(exchanged,
                                static_cast<uint32_t>(cluster_size()) * kWarps * sizeof(Vector));
    }
    mbarrier_wait(at.loaded, static_cast<uint32_t>(turn % 2));
    float sum = 0.f;
    for (int i = thread_index(); i < columns; i += kWarps * kWarp) sum += at.data[i];
    sum = warp_sum(sum);
    Vector* slots = parts + turn % 2 * cluster_size() * kWarps;
    if (lane < cluster_size()) {
      send_in_cluster(slots + cluster_rank() * kWarps + warp, lane, vector_of(sum), exchanged);
    }
    mbarrier_wait(exchanged, static_cast<uint32_t>(turn / kBarriers % 2));
    request(row + cluster_count());
    if (cluster_rank() == 0 && thread_index() == 0) {
      float total = 0.f;
      for (int i = 0; i < cluster_size() * kWarps; ++i) total += float_of(slots[i].words[0]);
      store(out + row, total);
    }
  }
}

// The cost of what a real kernel does: 80 shuffles and three cluster barriers for each of n rows.
__global__ void busy_kernel(const float*, float* out, int n) {
  float x = 1.f;
  for (int row = 0; row < n; ++row) {
    for (int i = 0; i < 80; ++i) x = shuffle_xor(x, 1 + i % 31);
    for (int i = 0; i < 3; ++i) {
      cluster_arrive();
      cluster_wait();
    }
  }
  store(out + block_x(), x);
}

const std::map<std::string, Kernel> kKernels{
    {"reverse", reverse_kernel},
    {"warp_sum", warp_sum_kernel},
    {"prefix_sum", prefix_sum_kernel},
    {"diverged_shuffle", diverged_shuffle_kernel},
    {"ended_lane", ended_lane_kernel},
    {"diverged_barrier", diverged_barrier_kernel},
    {"ended_thread", ended_thread_kernel},
    {"mixed_wait", mixed_wait_kernel},
    {"neighbour", neighbour_kernel},
    {"two_arrivals", two_arrivals_kernel},
    {"no_arrival", no_arrival_kernel},
    {"no_wait", no_wait_kernel},
    {"ended_block", ended_block_kernel},
    {"cluster_deadlock", cluster_deadlock_kernel},
    {"send_early", send_early_kernel},
    {"send_to_ended", send_to_ended_kernel},
    {"send_outside", send_outside_kernel},
    {"send_beyond_cluster", send_beyond_cluster_kernel},
    {"send_unprepared", send_unprepared_kernel},
    {"copy", copy_kernel},
    {"copy_early", copy_early_kernel},
    {"copy_no_fence", copy_no_fence_kernel},
    {"copy_no_init", copy_no_init_kernel},
    {"copy_no_wait", copy_no_wait_kernel},
    {"copy_short", copy_short_kernel},
    {"copy_twice", copy_twice_kernel},
    {"copy_size", copy_size_kernel},
    {"copy_from", copy_from_kernel},
    {"copy_to", copy_to_kernel},
    {"expect_too_much", expect_too_much_kernel},
    {"arrive_too_often", arrive_too_often_kernel},
    {"init_twice", init_twice_kernel},
    {"phases", phases_kernel},
    {"load", load_kernel},
    {"load_vector", load_vector_kernel},
    {"store", store_kernel},
    {"write_shared", write_shared_kernel},
    {"unwritten", unwritten_kernel},
    {"count", count_kernel},
    {"uniform", uniform_kernel},
    {"row_sums", row_sums_kernel<2>},
    {"row_sums_one_barrier", row_sums_kernel<1>},
    {"busy", busy_kernel},
};

// --- Arithmetic, over arrays of bits
// ---------------------------------------------------------------

using Words = std::vector<uint32_t>;

template <class F>
Words map_words(const Words& a, F&& f) {
  Words result;
  for (const uint32_t word : a) result.push_back(f(word));
  return result;
}
template <class F>
Words map_pairs(const Words& a, const Words& b, F&& f) {
  Words result;
  for (size_t i = 0; i < a.size(); ++i) result.push_back(f(a[i], b[i]));
  return result;
}
template <class E>
E element(uint32_t bits) {
  return {static_cast<uint16_t>(bits)};
}

}  // namespace
}  // namespace dspark::cuda

namespace py = pybind11;
using namespace dspark::cuda;

PYBIND11_MODULE(emulated_selftest, m) {
  dspark::emulation::bind_controls(m);
  m.def(
      "launch",
      [](const std::string& name, uintptr_t in, uintptr_t out, int n, std::vector<unsigned> grid,
         int threads, int shared, int cluster) {
        launch(name.c_str(), kKernels.at(name),
               Shape{grid[0], grid[1], grid[2], threads, shared, cluster}, nullptr,
               reinterpret_cast<const float*>(in), reinterpret_cast<float*>(out), n);
      },
      py::arg("name"), py::arg("input") = 0, py::arg("output") = 0, py::arg("n") = 0,
      py::arg("grid") = std::vector<unsigned>{1, 1, 1}, py::arg("threads") = kWarp,
      py::arg("shared") = 0, py::arg("cluster") = 0);
  m.def(
      "allow_large_clusters",
      [](const std::string& name, int shared) { allow_large_clusters(kKernels.at(name), shared); },
      py::arg("name"), py::arg("shared"));
  m.def(
      "max_active_clusters",
      [](const std::string& name, int threads, int shared, int cluster) {
        return max_active_clusters(kKernels.at(name), Shape{static_cast<unsigned>(cluster), 1, 1,
                                                            threads, shared, cluster});
      },
      py::arg("name"), py::arg("threads"), py::arg("shared"), py::arg("cluster"));
  m.def("device_guard", [](int device) { const DeviceGuard guard(device); });
  m.def("device", [] {
    const Device device = current_device();
    return std::vector<int64_t>{device.index, device.architecture, device.multiprocessors,
                                device.shared_bytes, device.l2_bytes};
  });

  m.def("exp2", [](const Words& x) {
    return map_words(
        x, [](uint32_t a) { return bits_of(dspark::emulation::exp2_approximate(float_of(a))); });
  });
  m.def("reciprocal", [](const Words& x) {
    return map_words(x, [](uint32_t a) { return bits_of(reciprocal_approximate(float_of(a))); });
  });
  m.def("maximum", [](const Words& a, const Words& b) {
    return map_pairs(
        a, b, [](uint32_t x, uint32_t y) { return bits_of(maximum(float_of(x), float_of(y))); });
  });
  m.def("minimum", [](const Words& a, const Words& b) {
    return map_pairs(
        a, b, [](uint32_t x, uint32_t y) { return bits_of(minimum(float_of(x), float_of(y))); });
  });
  m.def("bfloat16_to_float", [](const Words& a) {
    return map_words(a, [](uint32_t x) { return bits_of(to_float(element<BFloat16>(x))); });
  });
  m.def("half_to_float", [](const Words& a) {
    return map_words(a, [](uint32_t x) { return bits_of(to_float(element<Half>(x))); });
  });
  m.def("float_to_bfloat16", [](const Words& a) {
    return map_words(a, [](uint32_t x) { return from_float<BFloat16>(float_of(x)).bits; });
  });
  m.def("float_to_half", [](const Words& a) {
    return map_words(a, [](uint32_t x) { return from_float<Half>(float_of(x)).bits; });
  });
  m.def("pack_bfloat16", [](const Words& a, const Words& b) {
    return map_pairs(
        a, b, [](uint32_t x, uint32_t y) { return pack<BFloat16>(float_of(x), float_of(y)); });
  });
  m.def("pack_half", [](const Words& a, const Words& b) {
    return map_pairs(a, b,
                     [](uint32_t x, uint32_t y) { return pack<Half>(float_of(x), float_of(y)); });
  });
  m.def("maximum_bfloat16", [](const Words& a, const Words& b) {
    return map_pairs(a, b, [](uint32_t x, uint32_t y) { return maximum_of_pairs<BFloat16>(x, y); });
  });
  m.def("maximum_half", [](const Words& a, const Words& b) {
    return map_pairs(a, b, [](uint32_t x, uint32_t y) { return maximum_of_pairs<Half>(x, y); });
  });
}
