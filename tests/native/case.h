// One set of inputs for every op, small enough to be written on a line.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "machine.h"
#include "memory.h"

namespace dspark::native {

// What stands in a row of logits. kMixed: each of the others in turn.
enum class Values {
  kNormal,
  kWide,             // of a standard deviation of 30
  kConfident,        // one column far above the rest
  kTies,             // few different values
  kConstant,         // one value
  kSame,             // the draft's values, in a target
  kLeadingInfinity,  // -inf up to the last few columns
  kScattered,        // -inf in most columns
  kOffset,           // a large common offset
  kTiny,             // subnormal numbers
  kHuge,             // the largest finite numbers, of both signs
  kDescending,       // the maximum in the first column
  kAllInfinity,      // -inf: no distribution from here on
  kNaN,              // one NaN
  kInfinite,         // one +inf
  kBits,             // any bit pattern
  kMixed,
};
inline constexpr int kValues = static_cast<int>(Values::kMixed) + 1;

enum class Labels { kNone, kAnywhere, kAtMaximum, kFirst, kLast, kIgnored, kMixed };
inline constexpr int kLabels = static_cast<int>(Labels::kMixed) + 1;

enum class Activity { kNone, kAll, kMost, kFew, kNobody };  // kNone: no mask at all
inline constexpr int kActivities = static_cast<int>(Activity::kNobody) + 1;

// Coefficients of every row, before a factor of the row's own; NaN: no array.
struct Weights {
  double ce, l1;
};
inline constexpr double kAbsent = __builtin_nan("");
extern const std::vector<Weights> kWeights;

struct Case {
  std::vector<int64_t> sizes{1};
  int64_t columns = 1;
  DType draft = DType::kFloat32, target = DType::kFloat32;
  bool has_target = true;
  Layout draft_layout, target_layout, gradient_layout;
  Values draft_values = Values::kMixed, target_values = Values::kMixed;
  Labels labels = Labels::kMixed;
  Activity activity = Activity::kMost;
  int weights = 0;    // index of kWeights
  int64_t split = 0;  // columns of a first shard, in the ops that take statistics; 0: no shards
  int threads = 1;
  uint64_t seed = 1;
  std::vector<uint8_t> bits;  // of Values::kBits, repeated as often as it takes; empty: random

  std::string text() const;
};

// Runs every op on a machine and compares each result with float64 mathematics. Throws Mismatch.
void run(const Case& problem, Machine& machine);

struct ScaleCase {
  DType dtype = DType::kFloat32;
  int64_t count = 0, offset = 0;
  double factor = 1;
  bool wide_factor = false, in_place = false;
  int threads = 1;
  uint64_t seed = 1;
};
void run(const ScaleCase& problem, Machine& machine);

struct OrderedSumCase {
  bool wide = false;
  int64_t rows = 0, columns = 1;
  uint64_t seed = 1;
};
void run(const OrderedSumCase& problem, Machine& machine);

struct ExponentialCase {
  int64_t count = 0;
  uint64_t seed = 1;
};
void run(const ExponentialCase& problem, Machine& machine);

class Mismatch : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

}  // namespace dspark::native
