// The host's side of the hardware: the one exception of the CUDA path, the current device, what a
// launcher has to know about it, and the launch itself.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace dspark::cuda {

using Stream = cudaStream_t;

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t code, const char* call, const char* file, int line)
      : std::runtime_error(std::string(call) + " failed with " + cudaGetErrorName(code) + " (" +
                           cudaGetErrorString(code) + ") at " + file + ":" + std::to_string(line)) {
  }
};

inline void check(cudaError_t code, const char* call, const char* file, int line) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();  // an error that is reported here must not surface again elsewhere
  throw CudaError(code, call, file, line);
}

#define DSPARK_CUDA_CHECK(call) ::dspark::cuda::check((call), #call, __FILE__, __LINE__)

// Makes a device current for a scope. The previous one is restored even on an exception.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    DSPARK_CUDA_CHECK(cudaGetDevice(&previous_));
    if (device != previous_) DSPARK_CUDA_CHECK(cudaSetDevice(device));
  }
  ~DeviceGuard() { (void)cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

// What the current device is, as far as launches depend on it.
struct Device {
  int index;
  int architecture;  // 10 * major + minor
  int multiprocessors;
  int shared_bytes;  // of one multiprocessor
  int64_t l2_bytes;
};

inline Device current_device() {
  Device device{};
  DSPARK_CUDA_CHECK(cudaGetDevice(&device.index));
  const auto attribute = [&](cudaDeviceAttr name) {
    int value = 0;
    DSPARK_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, device.index));
    return value;
  };
  device.architecture = 10 * attribute(cudaDevAttrComputeCapabilityMajor) +
                        attribute(cudaDevAttrComputeCapabilityMinor);
  device.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  device.shared_bytes = attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  device.l2_bytes = attribute(cudaDevAttrL2CacheSize);
  return device;
}

struct Shape {
  unsigned x, y, z;  // blocks
  int threads;
  int shared_bytes = 0;
  int cluster = 0;  // blocks of a cluster, along x; 0 for a kernel that knows no clusters
};

// A launch configuration that refers to its own attribute, hence neither copied nor moved.
class Launch {
 public:
  Launch(const Shape& shape, Stream stream) {
    config_.gridDim = dim3(shape.x, shape.y, shape.z);
    config_.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config_.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes);
    config_.stream = stream;
    if (shape.cluster > 0) {
      attribute_.id = cudaLaunchAttributeClusterDimension;
      attribute_.val.clusterDim.x = static_cast<unsigned>(shape.cluster);
      attribute_.val.clusterDim.y = attribute_.val.clusterDim.z = 1;
      config_.attrs = &attribute_;
      config_.numAttrs = 1;
    }
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  const cudaLaunchConfig_t& config() const { return config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attribute_{};
};

// Asynchronous. `name` is the kernel's, for whoever counts what kernels do.
template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const Shape& shape, Stream stream,
            Arguments&&... arguments) {
  (void)name;
  const Launch launch(shape, stream);
  DSPARK_CUDA_CHECK(
      cudaLaunchKernelEx(&launch.config(), kernel, std::forward<Arguments>(arguments)...));
}

// Allows a kernel what it may not have by default: more than 48 KiB of shared memory, and
// clusters of more than 8 blocks.
template <class... Parameters>
void allow_large_clusters(void (*kernel)(Parameters...), int shared_bytes) {
  DSPARK_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  DSPARK_CUDA_CHECK(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
}

// How many clusters of this shape the current device can hold at once; 0 if none fits.
template <class... Parameters>
int max_active_clusters(void (*kernel)(Parameters...), const Shape& shape) {
  const Launch launch(shape, nullptr);
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch.config()) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  return clusters;
}

}  // namespace dspark::cuda
