// The CPU kernels, each level that this processor has.
#include <cstring>

#include "machine.h"
#include "memory.h"

namespace dspark::native {
namespace {

bool is_wide(const Rows* a, const Rows* b) {
  return a->dtype() == DType::kFloat64 || (b != nullptr && b->dtype() == DType::kFloat64);
}

class Cpu : public Machine {
 public:
  explicit Cpu(const cpu::Kernels& kernels) : kernels_(kernels) {}

  std::string name() const override { return kernels_.name; }
  bool is_device() const override { return false; }

  void log_softmax(cpu::LogSoftmaxArgs args) override {
    const Memory scratch(args.threads * kernels_.chunk_scratch_bytes(args.logits->columns()));
    args.scratch = scratch.data();
    scratch.forget_contents();
    kernels_.log_softmax(args);
  }
  void l1_distance(cpu::L1DistanceArgs args) override {
    const Memory scratch(args.threads * kernels_.chunk_scratch_bytes(args.draft->columns()));
    args.scratch = scratch.data();
    scratch.forget_contents();
    kernels_.l1_distance(args);
  }
  void gradient(cpu::GradientArgs args) override { kernels_.gradient(args); }
  void weighted(cpu::WeightedArgs args) override {
    const Memory scratch(
        args.threads *
        kernels_.weighted_scratch_bytes(args.draft->columns(), is_wide(args.draft, args.target)));
    args.scratch = scratch.data();
    scratch.forget_contents();
    kernels_.weighted(args);
  }
  void scale(cpu::ScaleArgs args) override { kernels_.scale(args); }
  void ordered_sum(cpu::OrderedSumArgs args) override { cpu::ordered_sum(args); }
  bool exponential(const float* x, float* y, int64_t count) override {
    kernels_.exponential(x, y, count);
    return true;
  }

 private:
  const cpu::Kernels& kernels_;
};

}  // namespace

std::vector<std::unique_ptr<Machine>> machines() {
  std::vector<std::unique_ptr<Machine>> result;
  result.push_back(std::make_unique<Cpu>(cpu::kernels_baseline()));
#ifdef DSPARK_HAVE_AVX2
  if (std::strstr(cpu::available_levels(), "avx2") != nullptr) {
    result.push_back(std::make_unique<Cpu>(cpu::kernels_avx2()));
  }
#endif
  return result;
}

}  // namespace dspark::native
