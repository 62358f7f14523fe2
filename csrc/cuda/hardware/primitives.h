// Everything in the kernels that is not plain C++, one function for each thing the hardware does.
// The kernels are written against this interface alone; tests/emulation/primitives.h implements
// it for a host, where each thread is a fiber, and so runs the kernels' own source without a GPU.
//
// Nothing here decides anything: what a function does beyond one or two instructions belongs into
// the kernels, where the tests execute it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

namespace dspark::cuda {

// --- Types ---------------------------------------------------------------------------------------

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

// What one memory instruction moves at most.
struct alignas(16) Vector {
  uint32_t words[4];
};

// Counts the arrivals and the bytes of asynchronous copies into one block's shared memory.
struct MBarrier {
  uint64_t state;
};

// --- Where a thread is ---------------------------------------------------------------------------

__device__ __forceinline__ int thread_index() { return static_cast<int>(threadIdx.x); }
__device__ __forceinline__ int64_t block_x() { return blockIdx.x; }
__device__ __forceinline__ int64_t block_y() { return blockIdx.y; }
__device__ __forceinline__ int64_t grid_x() { return gridDim.x; }

// The clusters of a one-dimensional grid, and a block's rank within its own. Volatile, so that a
// value is read again where it is needed and takes no register in between.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
}
__device__ __forceinline__ int cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
}
__device__ __forceinline__ int cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return static_cast<int>(index);
}
__device__ __forceinline__ int cluster_count() {
  uint32_t count;
  asm volatile("mov.u32 %0, %%nclusterid.x;" : "=r"(count));
  return static_cast<int>(count);
}

// --- Global memory -------------------------------------------------------------------------------

// Every access of a kernel to global memory is one of these four or a bulk copy. T has 1 to 16
// bytes and p its alignment. The streaming one is for what is not touched again soon.
template <class T>
__device__ __forceinline__ T load(const T* p) {
  return *p;
}
// The same for an address that all lanes of a warp share.
template <class T>
__device__ __forceinline__ T load_uniform(const T* p) {
  return *p;
}
template <class T>
__device__ __forceinline__ void store(T* p, T value) {
  *p = value;
}
__device__ __forceinline__ void store_streaming(Vector* p, Vector v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.words[0]),
               "r"(v.words[1]), "r"(v.words[2]), "r"(v.words[3])
               : "memory");
}

// --- Shared memory -------------------------------------------------------------------------------

// The block's dynamic shared memory, uninitialised.
__device__ __forceinline__ char* shared_memory() {
  extern __shared__ __align__(128) char dspark_shared[];
  return dspark_shared;
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- Warps and barriers --------------------------------------------------------------------------

inline constexpr int kWarp = 32;

// Of 32-bit values, among all 32 lanes.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
template <class T>
__device__ __forceinline__ T shuffle_up(T value, int distance) {
  return __shfl_up_sync(0xffffffffu, value, distance);
}

// Whether it holds in all 32 lanes; the compiler knows that they agree on the answer.
__device__ __forceinline__ bool all_in_warp(bool condition) {
  return __all_sync(0xffffffffu, condition) != 0;
}

__device__ __forceinline__ void block_barrier() { __syncthreads(); }

// Writes of every thread before it arrives are visible to every thread after it has waited. Slow:
// an arrival waits for all that the thread has written to global memory.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// --- Asynchronous copies -------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(MBarrier* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}
// Makes initialised barriers visible to the copy engine and to the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
// One arrival, and so many more bytes to wait for.
__device__ __forceinline__ void mbarrier_arrive_expecting(MBarrier* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
// Blocks until the phase of this parity is complete; the first phase has parity 0. What was
// reported to the barrier in that phase can be read then.
__device__ __forceinline__ void mbarrier_wait(MBarrier* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Copies from global into this block's shared memory and reports the bytes to the barrier.
// Both addresses and the size are multiples of 16.
__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes,
                                          MBarrier* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(shared)),
      "l"(global), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}

// Writes to the same place in the shared memory of another block of the cluster, some time later,
// and reports 16 bytes to the barrier at the same place there.
__device__ __forceinline__ void send_in_cluster(Vector* p, int rank, Vector v, MBarrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .b32 place, there;\n"
      "mapa.shared::cluster.u32 place, %0, %6;\n"
      "mapa.shared::cluster.u32 there, %1, %6;\n"
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
      "[place], {%2, %3, %4, %5}, [there];\n"
      "}" ::"r"(shared_address(p)),
      "r"(shared_address(barrier)), "r"(v.words[0]), "r"(v.words[1]), "r"(v.words[2]),
      "r"(v.words[3]), "r"(rank)
      : "memory");
}

// --- Arithmetic ----------------------------------------------------------------------------------

// 2^x within 2 ulp, subnormals flushed to 0; 2^0 is exactly 1.
__device__ __forceinline__ float exp2_approximate(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// 1 / x within 1 ulp.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log1p_of(float x) { return log1pf(x); }
// The larger and the smaller; the other one where one is NaN.
__device__ __forceinline__ float maximum(float a, float b) { return fmaxf(a, b); }
__device__ __forceinline__ float minimum(float a, float b) { return fminf(a, b); }

__device__ __forceinline__ uint32_t bits_of(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) {
  return float_of(static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(Half x) { return __half2float(__ushort_as_half(x.bits)); }

// Rounded to nearest, ties to even; NaN stays NaN.
template <class E>
__device__ __forceinline__ E from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return {__bfloat16_as_ushort(__float2bfloat16_rn(x))};
}
template <>
__device__ __forceinline__ Half from_float<Half>(float x) {
  return {__half_as_ushort(__float2half_rn(x))};
}

// Two 16-bit elements in one word, the lower column in the lower half.
template <class E>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack<Half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// Of both halves of two such words; a NaN loses.
template <class E>
__device__ __forceinline__ uint32_t maximum_of_pairs(uint32_t a, uint32_t b);
template <>
__device__ __forceinline__ uint32_t maximum_of_pairs<BFloat16>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
template <>
__device__ __forceinline__ uint32_t maximum_of_pairs<Half>(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

}  // namespace dspark::cuda
