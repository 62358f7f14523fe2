// Bytes to a case: what a fuzzer varies. Shapes, types, strides, masks, labels, special values,
// whole bit patterns of logits, and which machine runs it.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include "case.h"

namespace dspark::native {
namespace {

// Gives out the bytes one after another, and zeros behind the last.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  int64_t below(int64_t n) {
    const int64_t value = n <= 256 ? next() : next() | next() << 8;
    return value % n;
  }
  bool coin() { return below(2) == 1; }
  template <size_t n>
  int64_t of(const int64_t (&choices)[n]) {
    return choices[static_cast<size_t>(below(n))];
  }
  std::vector<uint8_t> rest() { return {data_ + used_, data_ + size_}; }

 private:
  int64_t next() { return used_ < size_ ? data_[used_++] : 0; }

  const uint8_t* data_;
  size_t size_, used_ = 0;
};

DType dtype_from(Bytes& bytes, bool is_device) {
  return static_cast<DType>(bytes.below(is_device ? 3 : 4));
}

Layout layout_from(Bytes& bytes, size_t dimensions, bool writable) {
  Layout layout;
  layout.offset = bytes.below(33);
  layout.padding = bytes.below(9);
  layout.gap = bytes.below(5);
  layout.reversed = bytes.coin();
  if (writable || bytes.coin()) return layout;
  layout.broadcast = static_cast<unsigned>(bytes.below(int64_t{1} << dimensions));
  if (bytes.coin()) layout.padding = -layout.padding * 40;
  return layout;
}

Case case_from(Bytes& bytes, bool is_device) {
  Case problem;
  problem.draft = dtype_from(bytes, is_device);
  problem.target = dtype_from(bytes, is_device);
  problem.has_target = !bytes.coin();
  problem.columns = 1 + (bytes.below(8) == 1 ? bytes.below(6200) : bytes.below(100));
  problem.sizes.clear();
  for (int64_t dimensions = bytes.below(4); dimensions > 0; --dimensions) {
    problem.sizes.push_back(bytes.below(5));
  }
  problem.draft_layout = layout_from(bytes, problem.sizes.size(), bytes.coin());
  problem.target_layout = layout_from(bytes, problem.sizes.size(), false);
  problem.gradient_layout = layout_from(bytes, problem.sizes.size(), true);
  problem.draft_values = static_cast<Values>(bytes.below(kValues));
  problem.target_values = static_cast<Values>(bytes.below(kValues));
  problem.labels = static_cast<Labels>(bytes.below(kLabels));
  problem.activity = static_cast<Activity>(bytes.below(kActivities));
  problem.weights = static_cast<int>(bytes.below(static_cast<int64_t>(kWeights.size())));
  problem.split = bytes.coin() ? bytes.below(problem.columns) : 0;
  problem.threads = is_device ? 1 : static_cast<int>(1 + bytes.below(3));
  // Rarely, a few rows too long for a single chunk and, on the host, for a single thread; or so
  // many of them that a gradient is written past the caches.
  const int64_t size = bytes.below(256);
  if (size >= 252) {
    problem.columns += is_device ? 8192 : 33000;
    problem.sizes = {size - 251};
  } else if (size == 251 && !is_device) {
    problem.columns += 2000;
    problem.sizes = {(int64_t{8} << 20) / (problem.columns * element_size(problem.draft)) + 1};
    problem.activity = Activity::kFew;
    problem.draft_layout.broadcast = problem.target_layout.broadcast = 1;
  }
  problem.seed = static_cast<uint64_t>(bytes.below(1 << 16));
  problem.bits = bytes.rest();
  return problem;
}

void run_bytes(Bytes bytes, Machine& machine) {
  switch (bytes.below(16)) {
    case 0: {
      ScaleCase problem;
      problem.dtype = dtype_from(bytes, machine.is_device());
      problem.count = bytes.below(9000);
      problem.offset = bytes.below(17);
      problem.factor = static_cast<double>(bytes.below(64)) / 8 - 2;
      problem.wide_factor = bytes.coin();
      problem.in_place = bytes.coin();
      problem.threads = static_cast<int>(1 + bytes.below(3));
      problem.seed = static_cast<uint64_t>(bytes.below(256));
      return run(problem, machine);
    }
    case 1: {
      OrderedSumCase problem;
      problem.wide = bytes.coin();
      problem.rows = bytes.below(1000);
      problem.columns = bytes.below(9);
      return run(problem, machine);
    }
    case 2:
      return run(ExponentialCase{bytes.below(3000), static_cast<uint64_t>(bytes.below(256))},
                 machine);
    default:
      return run(case_from(bytes, machine.is_device()), machine);
  }
}

}  // namespace
}  // namespace dspark::native

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto machines = dspark::native::machines();
  dspark::native::Bytes bytes(data, size);
  auto& machine = *machines[static_cast<size_t>(bytes.below(256)) % machines.size()];
  try {
    dspark::native::run_bytes(bytes, machine);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::abort();
  }
  return 0;
}
