// The element types of logits, written from their definitions and from nothing of the kernels.
#pragma once

#include <cstdint>

#include "rows.h"

namespace dspark::native {

const char* name_of(DType dtype);

// One element as a double, and a double rounded to the nearest element, ties to even.
double decode(const void* element, DType dtype);
void encode(double value, DType dtype, void* element);

// Relative error of that rounding at most, and its absolute error where elements are subnormal.
double half_unit(DType dtype);
double half_smallest(DType dtype);
double largest(DType dtype);

// splitmix64: the same numbers for a seed on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }
  double uniform();  // [0, 1)
  double normal();   // of unit variance, the sum of twelve uniform ones

 private:
  uint64_t state_;
};

}  // namespace dspark::native
