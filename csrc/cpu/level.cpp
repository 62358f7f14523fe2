// One instruction-set level of the CPU kernels. CMakeLists.txt compiles this file once per
// level, each time with that level's flags and its name in DSPARK_LEVEL; everything it includes
// has internal linkage, so that no level's code can be linked into another.
#include <type_traits>

#include "gradient.h"
#include "l1_distance.h"
#include "log_softmax.h"
#include "scale.h"
#include "weighted.h"

#define DSPARK_STRING_(x) #x
#define DSPARK_STRING(x) DSPARK_STRING_(x)
#define DSPARK_JOIN_(a, b) a##b
#define DSPARK_JOIN(a, b) DSPARK_JOIN_(a, b)

namespace dspark::cpu {
namespace {

bool is_wide(const Rows* a, const Rows* b) {
  return a->dtype() == DType::kFloat64 || (b != nullptr && b->dtype() == DType::kFloat64);
}

void log_softmax(const LogSoftmaxArgs& args) {
  is_wide(args.logits, nullptr) ? log_softmax_rows<double>(args) : log_softmax_rows<float>(args);
}

void l1_distance(const L1DistanceArgs& args) {
  is_wide(args.draft, args.target) ? l1_distance_rows<double>(args) : l1_distance_rows<float>(args);
}

void gradient(const GradientArgs& args) {
  is_wide(args.draft, args.target) ? gradient_rows<double>(args) : gradient_rows<float>(args);
}

void weighted(const WeightedArgs& args) {
  is_wide(args.draft, args.target) ? weighted_rows<double>(args) : weighted_rows<float>(args);
}

void scale(const ScaleArgs& args) { scale_all(args); }

void exponential_of(const float* x, float* y, int64_t count) {
  for_each_block<float>(x, count, [&](int64_t i, const float* block) {
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t begin = i + u * kLanes<float>;
      const Vec<float> v = exponential(load<float>(block + u * kLanes<float>));
      const int64_t left = count - begin < kLanes<float> ? count - begin : kLanes<float>;
      if (left > 0) std::memcpy(y + begin, &v, static_cast<size_t>(left) * sizeof(float));
    }
  });
}

}  // namespace

const Kernels& DSPARK_JOIN(kernels_, DSPARK_LEVEL)() {
  static constexpr Kernels kernels{
      DSPARK_STRING(DSPARK_LEVEL),
      log_softmax,
      l1_distance,
      gradient,
      weighted,
      scale,
      chunk_scratch_bytes,
      weighted_scratch_bytes,
      exponential_of,
  };
  return kernels;
}

}  // namespace dspark::cpu
