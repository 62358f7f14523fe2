#include "expected.h"

#include <cmath>
#include <utility>

namespace dspark::native {
namespace {

// Operations that follow an exponential: the sum's reciprocal and products.
constexpr double kOperations = 16;

// A sum to the last digit but one: what is rounded away in one step is added in the end.
class Total {
 public:
  void add(double value) {
    const double sum = sum_ + value;
    lost_ += std::fabs(sum_) >= std::fabs(value) ? sum_ - sum + value : value - sum + sum_;
    sum_ = sum;
  }
  double value() const { return sum_ + lost_; }

 private:
  double sum_ = 0, lost_ = 0;
};

}  // namespace

bool Bounded::holds(double result) const {
  if (std::isnan(value)) return std::isnan(result);
  if (std::isinf(value)) return result == value;
  return std::fabs(result - value) <= error;
}

Softmax::Softmax(std::vector<double> logits, const Precision& precision)
    : x(std::move(logits)), p(x.size()), error(x.size()), m(-INFINITY), c(0) {
  bool has_nan = false;
  for (const double value : x) {
    has_nan = has_nan || std::isnan(value);
    if (value > m) m = value;
  }
  has_distribution = !has_nan && std::isfinite(m);
  Total others;
  for (size_t j = 0; j < x.size(); ++j) {
    if (x[j] == m) {
      ++c;
      p[j] = 1;
    } else {
      p[j] = std::exp(x[j] - m);
      others.add(p[j]);
    }
    // A difference of logits is off by half a unit, which an exponential makes relative.
    error[j] = precision.epsilon * (kOperations + (p[j] > 0 ? m - x[j] : 0));
    if (x[j] != m) t.error += error[j] * p[j] + precision.floor;
  }
  t.value = others.value();
  t.error += precision.sums * t.value;
  for (double& value : p) value /= z();
  for (double& value : error) value += precision.sums * t.value / z();
}

Bounded cross_entropy(const Softmax& draft, int64_t label, const Precision& precision) {
  if (label == kNoLabel) return {};
  if (!draft.has_distribution) return {NAN, 0};
  const double log_z = std::log1p(draft.c - 1 + draft.t.value);
  const double below = draft.m - draft.x[static_cast<size_t>(label)];
  return {log_z + below, draft.t.error / draft.z() + precision.epsilon * (log_z + below)};
}

Distance::Distance(const Softmax& draft, const Softmax& target, bool same,
                   const Precision& precision)
    : sign(draft.x.size()), unresolved(draft.x.size()) {
  if (!draft.has_distribution || !target.has_distribution) {
    l1 = below_one = above_one = {NAN, 0};
    return;
  }
  const bool equal = same && draft.x == target.x;
  Total distance, below, above;
  for (size_t j = 0; j < draft.x.size(); ++j) {
    const double p = draft.p[j], q = target.p[j];
    const double p_error = draft.error[j] * p + precision.floor;
    const double q_error = target.error[j] * q + precision.floor;
    sign[j] = static_cast<int8_t>((p > q) - (p < q));
    unresolved[j] = !equal && std::fabs(p - q) <= p_error + q_error;
    distance.add(std::fabs(p - q));
    below.add((1 - sign[j]) * p);
    above.add((1 + sign[j]) * p);
    l1.error += equal ? 0 : p_error + q_error;
    below_one.error += (1 - sign[j]) * p_error;
    above_one.error += (1 + sign[j]) * p_error;
    if (unresolved[j]) {
      below_one.error += 2 * (p + p_error);
      above_one.error += 2 * (p + p_error);
    }
  }
  l1.value = distance.value();
  below_one.value = below.value();
  above_one.value = above.value();
  if (!equal) l1.error += precision.sums;
  below_one.error += precision.sums * below_one.value;
  above_one.error += precision.sums * above_one.value;
}

Bounded gradient(const Softmax& draft, const Distance* distance, int64_t column, int sign,
                 bool is_label, double a, double b, const Precision& precision) {
  if (!draft.has_distribution) return {NAN, 0};
  if (b == 0) distance = nullptr;
  if (distance != nullptr && std::isnan(distance->l1.value)) return {NAN, 0};
  const auto j = static_cast<size_t>(column);
  const double p = draft.p[j], p_error = draft.error[j] * p + precision.floor;
  Bounded slope;
  if (distance != nullptr) {
    const Bounded &below = distance->below_one, &above = distance->above_one;
    slope = sign > 0   ? below
            : sign < 0 ? Bounded{-above.value, above.error}
                       : Bounded{(below.value - above.value) / 2, (below.error + above.error) / 2};
    // A difference of the two sides, and of the two coefficients, is rounded once more.
    slope.error += precision.epsilon * (below.value + above.value);
  }
  Bounded ce{p, p_error};
  if (is_label) {
    ce.value = p - 1;
    if (draft.x[j] == draft.m) {
      ce.value = -(draft.c - 1 + draft.t.value) / draft.z();
      ce.error = draft.t.error / draft.z() + precision.epsilon * std::fabs(ce.value);
    }
  }
  const double value = a * ce.value + b * p * slope.value;
  const double scale = std::fabs(a * ce.value) + std::fabs(b * p * slope.value);
  double error = std::fabs(b) * (p_error * std::fabs(slope.value) + p * slope.error);
  error += std::fabs(a) * ce.error + 4 * precision.epsilon * scale;
  return {value, error};
}

}  // namespace dspark::native
