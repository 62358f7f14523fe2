// The host's side of csrc/cuda/hardware/runtime.h, for kernels that run in the emulator. A launch
// has been carried out when it returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "emulator.h"

namespace dspark::cuda {

using Stream = void*;

class CudaError : public std::runtime_error {
 public:
  CudaError(const char* code, const std::string& reason, const char* call, const char* file,
            int line)
      : std::runtime_error(std::string(call) + " failed with " + code + " (" + reason + ") at " +
                           file + ":" + std::to_string(line)) {}
};

// Only 0 is success, as in CUDA.
inline void check(int code, const char* call, const char* file, int line) {
  if (code != 0) throw CudaError(std::to_string(code).c_str(), "emulated", call, file, line);
}

#define DSPARK_CUDA_CHECK(call) \
  ::dspark::cuda::check(static_cast<int>(call), #call, __FILE__, __LINE__)

// Callers name the one device 0, whichever it is, or -1: that of memory which belongs to none.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    if (device < -1 || device > 0) {
      throw CudaError("cudaErrorInvalidDevice", "invalid device ordinal", "cudaSetDevice(device)",
                      __FILE__, __LINE__);
    }
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
};

struct Device {
  int index;
  int architecture;  // 10 * major + minor
  int multiprocessors;
  int shared_bytes;  // of one multiprocessor
  int64_t l2_bytes;
};

inline Device current_device() { return emulation::device(); }

struct Shape {
  unsigned x, y, z;  // blocks
  int threads;
  int shared_bytes = 0;
  int cluster = 0;  // blocks of a cluster, along x; 0 for a kernel that knows no clusters
};

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Shape& shape, Stream stream,
            Arguments&&... arguments) {
  (void)stream;
  static_assert((sizeof(Parameters) + ... + 0) <= 4096, "what a kernel's parameters may take");
  // Converted once, as a launch does, and copied for each thread.
  const auto convert = [&](Parameters... parameters) {
    const auto thread = [&] { kernel(parameters...); };
    const auto body = [](const void* p) { (*static_cast<const decltype(thread)*>(p))(); };
    emulation::run(name, reinterpret_cast<const void*>(kernel), shape, body, &thread);
  };
  convert(std::forward<Arguments>(arguments)...);
}

template <class... Parameters>
void allow_large_clusters(void (*kernel)(Parameters...), int shared_bytes) {
  emulation::allow_large_clusters(reinterpret_cast<const void*>(kernel), shared_bytes);
}

template <class... Parameters>
int max_active_clusters(void (*kernel)(Parameters...), const Shape& shape) {
  return emulation::max_active_clusters(reinterpret_cast<const void*>(kernel), shape);
}

}  // namespace dspark::cuda
