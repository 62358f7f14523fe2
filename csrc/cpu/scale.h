// scale: destination = source * factor, the upstream gradient applied to a finished gradient.
// Formed in fp32 (double for float64) and rounded once. Nothing is touched when the factor is 1
// and the destination is the source, which is the ordinary backward pass.
#pragma once

#include "elements.h"
#include "threads.h"

namespace dspark::cpu {
namespace {

template <class E>
void scale_elements(const ScaleArgs& args, double factor) {
  using Real = std::conditional_t<sizeof(E) == 8, double, float>;
  const E* source = static_cast<const E*>(args.source);
  E* destination = static_cast<E*>(args.destination);
  const Real f = static_cast<Real>(factor);
  for_each_row_alone(
      chunk_count(args.count), kChunkColumns, args.threads, [&](int64_t chunk, int, int) {
        const int64_t end = (chunk + 1) * kChunkColumns;
        for (int64_t i = chunk * kChunkColumns; i < (end < args.count ? end : args.count); ++i) {
          destination[i] = from_real<E>(static_cast<double>(to_real<Real>(source[i]) * f));
        }
      });
}

inline void scale_all(const ScaleArgs& args) {
  const double factor = args.factor_dtype == DType::kFloat64
                            ? *static_cast<const double*>(args.factor)
                            : static_cast<double>(*static_cast<const float*>(args.factor));
  if (factor == 1 && args.source == args.destination) return;
  with_element_type(args.dtype, [&](auto* type) {
    scale_elements<std::remove_pointer_t<decltype(type)>>(args, factor);
  });
}

}  // namespace
}  // namespace dspark::cpu
