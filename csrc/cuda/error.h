// The one exception of the CUDA side: what failed, CUDA's name for it, and where.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace dspark::cuda {

class CudaError : public std::runtime_error {
 public:
  CudaError(cudaError_t code, const char* call, const char* file, int line)
      : std::runtime_error(std::string(call) + " failed with " + cudaGetErrorName(code) + " (" +
                           cudaGetErrorString(code) + ") at " + file + ":" + std::to_string(line)) {
  }
};

inline void check(cudaError_t code, const char* call, const char* file, int line) {
  if (code != cudaSuccess) throw CudaError(code, call, file, line);
}

// Makes a device current for a scope. The previous one is restored even on an exception.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&previous_), "cudaGetDevice", __FILE__, __LINE__);
    if (device != previous_) check(cudaSetDevice(device), "cudaSetDevice", __FILE__, __LINE__);
  }
  ~DeviceGuard() { (void)cudaSetDevice(previous_); }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
};

}  // namespace dspark::cuda

#define DSPARK_CUDA_CHECK(call) ::dspark::cuda::check((call), #call, __FILE__, __LINE__)
