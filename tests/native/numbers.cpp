#include "numbers.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace dspark::native {
namespace {

struct Format {
  const char* name;
  int digits;    // of the significand, the leading one included
  int smallest;  // exponent of the smallest normal number
  double largest;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return {"float32", 24, -126, 0x1.fffffep127};
    case DType::kBFloat16:
      return {"bfloat16", 8, -126, 0x1.fep127};
    case DType::kFloat16:
      return {"float16", 11, -14, 65504};
    default:
      return {"float64", 53, -1022, std::numeric_limits<double>::max()};
  }
}

double half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  double value = exponent == 0    ? std::ldexp(mantissa, -24)
                 : exponent == 31 ? (mantissa == 0 ? INFINITY : NAN)
                                  : std::ldexp(1024 + mantissa, exponent - 25);
  return bits >> 15 ? -value : value;
}

std::vector<double> all_halves() {
  std::vector<double> values(1 << 16);
  for (int i = 0; i < 1 << 16; ++i) values[i] = half_value(static_cast<uint16_t>(i));
  return values;
}

double rounded(double value, const Format& format) {
  if (value == 0 || !std::isfinite(value)) return value;
  const int exponent = std::max(std::ilogb(value), format.smallest) - (format.digits - 1);
  const double result = std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
  return std::fabs(result) > format.largest ? std::copysign(INFINITY, value) : result;
}

template <class T>
T bit_cast(const void* source) {
  T value;
  std::memcpy(&value, source, sizeof value);
  return value;
}

}  // namespace

const char* name_of(DType dtype) { return format_of(dtype).name; }

double decode(const void* element, DType dtype) {
  static const std::vector<double> halves = all_halves();
  if (dtype == DType::kFloat64) return bit_cast<double>(element);
  if (dtype == DType::kFloat32) return static_cast<double>(bit_cast<float>(element));
  const uint16_t bits = bit_cast<uint16_t>(element);
  if (dtype == DType::kFloat16) return halves[bits];
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  return static_cast<double>(bit_cast<float>(&wide));
}

void encode(double value, DType dtype, void* element) {
  const double exact = rounded(value, format_of(dtype));
  const float narrow = static_cast<float>(exact);
  const uint16_t sign = std::signbit(exact) ? 0x8000 : 0;
  const double magnitude = std::fabs(exact);
  uint16_t bits = 0;
  if (dtype == DType::kFloat64) {
    std::memcpy(element, &exact, sizeof exact);
    return;
  }
  if (dtype == DType::kFloat32) {
    std::memcpy(element, &narrow, sizeof narrow);
    return;
  }
  if (dtype == DType::kBFloat16) {
    bits = std::isnan(exact) ? 0x7fc0 : static_cast<uint16_t>(bit_cast<uint32_t>(&narrow) >> 16);
  } else if (std::isnan(exact)) {
    bits = 0x7e00;
  } else if (std::isinf(exact)) {
    bits = sign | 0x7c00;
  } else if (magnitude < 0x1p-14) {
    bits = sign | static_cast<uint16_t>(std::ldexp(magnitude, 24));
  } else {
    const int exponent = std::ilogb(magnitude);
    const int mantissa = static_cast<int>(std::ldexp(magnitude, 10 - exponent)) - 1024;
    bits = sign | static_cast<uint16_t>((exponent + 15) << 10 | mantissa);
  }
  std::memcpy(element, &bits, sizeof bits);
}

double half_unit(DType dtype) { return std::ldexp(1, -format_of(dtype).digits); }

double half_smallest(DType dtype) {
  const Format format = format_of(dtype);
  return std::ldexp(1, format.smallest - format.digits);
}

double largest(DType dtype) { return format_of(dtype).largest; }

uint64_t Random::bits() {
  state_ += 0x9e3779b97f4a7c15u;
  uint64_t z = state_;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

double Random::uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }

double Random::normal() {
  double sum = -6;
  for (int i = 0; i < 3; ++i) {
    for (uint64_t word = bits(), k = 0; k < 4; ++k, word >>= 16) {
      sum += static_cast<double>(word & 0xffff) * 0x1p-16;
    }
  }
  return sum;
}

}  // namespace dspark::native
