// Where the ops run: the CPU kernels of one instruction-set level, or the CUDA kernels in the
// emulator. One vocabulary for both, that of cpu/kernels.h; scratch is the machine's own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cpu/kernels.h"

namespace dspark::native {

class Machine {
 public:
  virtual ~Machine() = default;
  virtual std::string name() const = 0;
  // A device takes no float64, computes to the precision of its own exponential, needs every array
  // of a fused op and leaves alone what takes a target where there is none.
  virtual bool is_device() const = 0;

  virtual void log_softmax(cpu::LogSoftmaxArgs args) = 0;
  virtual void l1_distance(cpu::L1DistanceArgs args) = 0;
  virtual void gradient(cpu::GradientArgs args) = 0;
  virtual void weighted(cpu::WeightedArgs args) = 0;
  virtual void scale(cpu::ScaleArgs args) = 0;
  virtual void ordered_sum(cpu::OrderedSumArgs args) = 0;
  // The exponential alone; false where it cannot be had.
  virtual bool exponential(const float* x, float* y, int64_t count) = 0;
};

// Every machine of this build that this processor can be.
std::vector<std::unique_ptr<Machine>> machines();

}  // namespace dspark::native
