// The CUDA kernels in the emulator of tests/emulation, which sees each access to global memory.
#include "cuda/kernels.h"
#include "emulator.h"
#include "machine.h"
#include "memory.h"

namespace dspark::native {
namespace {

template <class T>
const T* typed(const void* p) {
  return static_cast<const T*>(p);
}
template <class T>
T* typed(void* p) {
  return static_cast<T*>(p);
}

// Shows the emulator the memory of a call, and withdraws it afterwards.
class Declared {
 public:
  Declared() {
    for (const Memory* memory : Memory::all()) {
      if (memory->bytes() == 0) continue;
      emulation::allow(reinterpret_cast<uintptr_t>(memory->data()),
                       static_cast<size_t>(memory->bytes()), true, "memory of the test");
    }
  }
  ~Declared() { emulation::forget(); }
  Declared(const Declared&) = delete;
  Declared& operator=(const Declared&) = delete;
};

class Emulated : public Machine {
 public:
  Emulated() { emulation::set_max_clusters(3); }

  std::string name() const override { return "emulated"; }
  bool is_device() const override { return true; }

  void log_softmax(cpu::LogSoftmaxArgs args) override {
    const Memory scratch(cuda::scratch_bytes(*args.logits, nullptr, 0));
    const Declared declared;
    cuda::log_softmax({args.logits, args.logits, args.ids, args.active,
                       typed<float>(args.statistics), typed<float>(args.log_prob), scratch.data()},
                      0, nullptr);
  }
  void l1_distance(cpu::L1DistanceArgs args) override {
    const Memory scratch(cuda::scratch_bytes(*args.draft, args.target, 0));
    const Declared declared;
    cuda::l1_distance({args.draft, args.target, args.active, typed<float>(args.draft_statistics),
                       typed<float>(args.target_statistics), typed<float>(args.l1),
                       typed<float>(args.sides), scratch.data()},
                      0, nullptr);
  }
  void gradient(cpu::GradientArgs args) override {
    const Declared declared;
    cuda::gradient(
        {args.draft, args.target, args.ids, args.active, typed<float>(args.draft_statistics),
         typed<float>(args.target_statistics), typed<float>(args.sides),
         typed<float>(args.ce_coefficient), typed<float>(args.l1_coefficient), args.gradient},
        0, nullptr);
  }
  void weighted(cpu::WeightedArgs args) override {
    const Memory scratch(cuda::scratch_bytes(*args.draft, args.target, 0));
    const Declared declared;
    cuda::weighted(
        {args.draft, args.target, args.ids, args.active, typed<float>(args.ce_coefficient),
         typed<float>(args.l1_coefficient), typed<float>(args.ce), typed<float>(args.l1),
         typed<float>(args.draft_statistics), typed<float>(args.target_statistics),
         typed<float>(args.sides), args.gradient, scratch.data()},
        0, nullptr);
  }
  void scale(cpu::ScaleArgs args) override {
    const Declared declared;
    cuda::scale({args.source, args.destination, args.dtype, args.count, typed<float>(args.factor)},
                0, nullptr);
  }
  void ordered_sum(cpu::OrderedSumArgs args) override {
    const Declared declared;
    cuda::ordered_sum({args.values, args.sums, args.dtype, args.rows, args.columns}, 0, nullptr);
  }
  bool exponential(const float*, float*, int64_t) override { return false; }
};

}  // namespace

std::vector<std::unique_ptr<Machine>> machines() {
  std::vector<std::unique_ptr<Machine>> result;
  result.push_back(std::make_unique<Emulated>());
  return result;
}

}  // namespace dspark::native
