// A row's results in float64, from their definitions and from nothing of the kernels, and how far
// a result in the arithmetic of a kernel may be from each.
#pragma once

#include <cstdint>
#include <vector>

namespace dspark::native {

// Of the arithmetic, not of the elements in memory.
struct Precision {
  double epsilon;  // of one operation
  double sums;     // relative error of a sum over a row
  double floor;    // exponentials below it may be 0
};
inline constexpr Precision kNarrow{0x1p-23, 2e-6, 0x1p-124};
inline constexpr Precision kWide{0x1p-52, 1e-13, 0x1p-1020};

// A value and how far a result may be from it.
struct Bounded {
  double value = 0, error = 0;

  bool holds(double result) const;
};

// One row of logits.
struct Softmax {
  Softmax(std::vector<double> logits, const Precision& precision);

  std::vector<double> x, p;
  std::vector<double> error;  // of each p, relative
  double m, c;
  Bounded t;
  bool has_distribution;
  double z() const { return c + t.value; }
};

inline constexpr int64_t kNoLabel = -100;

Bounded cross_entropy(const Softmax& draft, int64_t label, const Precision& precision);

// What a row pair has: l1 and the two sides of S, 1 - S and 1 + S.
struct Distance {
  // `same`: the kernel's arithmetic is the same for both rows, so that equal ones tie exactly.
  Distance(const Softmax& draft, const Softmax& target, bool same, const Precision& precision);

  Bounded l1, below_one, above_one;
  std::vector<int8_t> sign;         // of p - q
  std::vector<uint8_t> unresolved;  // columns where the arithmetic cannot know it
};

// a (p - [j = label]) + b p (s - S) at column j for a sign s of p - q; `distance` null: no target.
Bounded gradient(const Softmax& draft, const Distance* distance, int64_t column, int sign,
                 bool is_label, double a, double b, const Precision& precision);

}  // namespace dspark::native
