#include "case.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <sstream>

#include "expected.h"

namespace dspark::native {

const std::vector<Weights> kWeights{
    {1, 0},       {0, 1},       {0.3, 0.7},   {-2, 0.5},          {1024, -512},
    {1e-6, 1e-7}, {1, kAbsent}, {kAbsent, 1}, {kAbsent, kAbsent},
};

namespace {

constexpr int64_t kElsewhere = INT64_MIN;

// --- Inputs --------------------------------------------------------------------------------------

void fill_bits(Matrix& matrix, int64_t row, const std::vector<uint8_t>& bits, Random& random) {
  const auto size = static_cast<size_t>(matrix.columns() * element_size(matrix.dtype()));
  auto* bytes = reinterpret_cast<uint8_t*>(matrix.element(row, 0));
  for (size_t i = 0; i < size; ++i) {
    bytes[i] = bits.empty() ? static_cast<uint8_t>(random.bits())
                            : bits[(static_cast<size_t>(row) * size + i) % bits.size()];
  }
}

double value_of(Values values, int64_t column, int64_t columns, DType dtype, Random& random) {
  switch (values) {
    case Values::kWide:
      return 30 * random.normal();
    case Values::kTies:
      return 0.5 * static_cast<double>(random.below(4));
    case Values::kConstant:
      return 1.5;
    case Values::kLeadingInfinity:
      return column < columns - 3 ? -INFINITY : random.normal();
    case Values::kScattered:
      return random.below(4) > 0 ? -INFINITY : random.normal();
    case Values::kOffset:
      return (dtype == DType::kFloat16 ? 3e4 : 1e5) + random.normal();
    case Values::kTiny:
      return static_cast<double>(random.below(9) - 4) * 2 * half_smallest(dtype);
    case Values::kHuge:
      return random.below(2) == 0 ? largest(dtype) : -largest(dtype);
    case Values::kDescending:
      return -0.01 * static_cast<double>(column);
    case Values::kAllInfinity:
      return -INFINITY;
    default:
      return random.normal();
  }
}

void fill_row(Matrix& matrix, int64_t row, Values values, const std::vector<uint8_t>& bits,
              Random& random) {
  const int64_t columns = matrix.columns();
  if (values == Values::kBits) return fill_bits(matrix, row, bits, random);
  for (int64_t j = 0; j < columns; ++j) {
    matrix.set(row, j, value_of(values, j, columns, matrix.dtype(), random));
  }
  const int64_t special = random.below(columns);
  if (values == Values::kConfident) matrix.set(row, special, 25);
  if (values == Values::kNaN) matrix.set(row, special, NAN);
  if (values == Values::kInfinite) matrix.set(row, special, INFINITY);
}

// Rows that take no part stay the NaN that they are made of.
void fill(Matrix& matrix, Values values, const std::vector<uint8_t>& bits, const Matrix* draft,
          const std::vector<uint8_t>& active, uint64_t seed) {
  Random random(seed);
  for (int64_t row = 0; row < matrix.count(); ++row) {
    if (active[static_cast<size_t>(row)] == 0) continue;
    // A prime number of steps apart, so that draft and target do not go together.
    const int64_t turn = draft == nullptr ? row : 7 * row + 3;
    const Values kind = values != Values::kMixed
                            ? values
                            : static_cast<Values>(turn % static_cast<int>(Values::kMixed));
    if (kind == Values::kSame && draft != nullptr) {
      for (int64_t j = 0; j < matrix.columns(); ++j) matrix.set(row, j, draft->get(row, j));
    } else {
      fill_row(matrix, row, kind, bits, random);
    }
  }
}

bool is_active(Activity activity, int64_t row) {
  switch (activity) {
    case Activity::kMost:
      return row % 4 != 1;
    case Activity::kFew:
      return row % 257 >= 2 && row % 257 <= 4;
    case Activity::kNobody:
      return false;
    default:
      return true;
  }
}

int64_t maximum_of(const Matrix& matrix, int64_t row) {
  int64_t best = 0;
  for (int64_t j = 1; j < matrix.columns(); ++j) {
    if (matrix.get(row, j) > matrix.get(row, best)) best = j;
  }
  return best;
}

int64_t label_of(Labels labels, const Matrix& draft, int64_t row, bool may_be_refused,
                 Random& random) {
  if (labels == Labels::kMixed) {
    if (may_be_refused && row % 11 == 5) return row % 2 == 0 ? draft.columns() : -1;
    labels = static_cast<Labels>(1 + row % (static_cast<int>(Labels::kMixed) - 1));
  }
  switch (labels) {
    case Labels::kAtMaximum:
      return maximum_of(draft, row);
    case Labels::kFirst:
      return 0;
    case Labels::kLast:
      return draft.columns() - 1;
    case Labels::kIgnored:
      return kNoLabel;
    default:
      return random.below(draft.columns());
  }
}

bool is_wide(DType a, std::optional<DType> b) {
  return a == DType::kFloat64 || b == DType::kFloat64;
}

struct Inputs {
  Inputs(const Case& problem, const Machine& machine);

  const Case& problem;
  Matrix draft;
  std::optional<Matrix> target;
  std::vector<uint8_t> active;  // of every row
  std::vector<int64_t> labels;
  Memory active_memory, label_memory;
  bool wide;
  Reals a, b;

  int64_t count() const { return draft.count(); }
  const uint8_t* actives() const {
    const bool is_null = problem.activity == Activity::kNone;
    return is_null ? nullptr : reinterpret_cast<const uint8_t*>(active_memory.data());
  }
  const int64_t* ids() const {
    const bool is_null = problem.labels == Labels::kNone;
    return is_null ? nullptr : reinterpret_cast<const int64_t*>(label_memory.data());
  }
  const Weights& weights() const { return kWeights[static_cast<size_t>(problem.weights)]; }
  // Inactive rows may hold anything, and nothing may look.
  void forbid() {
    draft.forbid_all_but(active);
    if (target) target->forbid_all_but(active);
  }
  void permit() {
    draft.permit();
    if (target) target->permit();
  }
};

Inputs::Inputs(const Case& problem, const Machine& machine)
    : problem(problem),
      draft(problem.draft, problem.sizes, problem.columns, problem.draft_layout),
      active_memory(draft.count()),
      label_memory(draft.count() * 8),
      wide(is_wide(problem.draft,
                   problem.has_target ? std::optional(problem.target) : std::nullopt)),
      a(draft.count(), wide),
      b(draft.count(), wide) {
  for (int64_t row = 0; row < count(); ++row) active.push_back(is_active(problem.activity, row));
  fill(draft, problem.draft_values, problem.bits, nullptr, active, 2 * problem.seed);
  if (problem.has_target) {
    target.emplace(problem.target, problem.sizes, problem.columns, problem.target_layout);
    fill(*target, problem.target_values, problem.bits, &draft, active, 2 * problem.seed + 1);
  }
  Random random(~problem.seed);
  for (int64_t row = 0; row < count(); ++row) {
    labels.push_back(active[static_cast<size_t>(row)] == 0
                         ? random.bits()
                         : label_of(problem.labels, draft, row, machine.is_device(), random));
    const double factor = 1 + static_cast<double>(row % 5) / 4;
    a.set(row, std::isnan(weights().ce) ? 0 : factor * weights().ce);
    b.set(row, std::isnan(weights().l1) ? 0 : factor * weights().l1);
  }
  if (count() == 0) return;
  std::memcpy(active_memory.data(), active.data(), active.size());
  std::memcpy(label_memory.data(), labels.data(), labels.size() * 8);
}

// --- Results -------------------------------------------------------------------------------------

// What one way through the ops gives.
struct Results {
  Results(const char* way, const Inputs& inputs, bool wide_statistics)
      : way(way),
        draft_statistics(3 * inputs.count(), wide_statistics),
        target_statistics(3 * inputs.count(), wide_statistics),
        sides(2 * inputs.count(), inputs.wide),
        ce(inputs.count(), inputs.wide),
        l1(inputs.count(), inputs.wide) {}

  const char* way;
  Reals draft_statistics, target_statistics, sides, ce, l1;
  bool has_statistics = true;
  bool is_fused = true;
  bool has_ce = true;
  std::optional<Matrix> fresh;
  Matrix* gradient = nullptr;  // null: evaluation
};

Matrix& add_gradient(Results& results, const Case& problem) {
  results.fresh.emplace(problem.draft, problem.sizes, problem.columns, problem.gradient_layout);
  results.gradient = &*results.fresh;
  results.fresh->forbid_all_but({});
  return *results.fresh;
}

void copy(const Reals& from, Reals& to) {
  for (int64_t i = 0; i < from.count(); ++i) to.set(i, from[i]);
}

// A shard's statistics added to those of the shards before it.
void merge(Reals& all, const Reals& shard) {
  for (int64_t i = 0; i < all.count(); i += 3) {
    const double m = std::fmax(all[i], shard[i]);
    double c = 0, t = 0;
    for (const Reals* part : {static_cast<const Reals*>(&all), &shard}) {
      const bool holds = (*part)[i] == m;
      c += holds ? (*part)[i + 1] : 0;
      t += holds ? (*part)[i + 2] : ((*part)[i + 1] + (*part)[i + 2]) * std::exp((*part)[i] - m);
    }
    all.set(i, m);
    all.set(i + 1, c);
    all.set(i + 2, t);
  }
}

struct Shard {
  int64_t begin, count;
};

std::vector<Shard> shards_of(const Case& problem) {
  if (problem.split <= 0 || problem.split >= problem.columns) return {{0, problem.columns}};
  return {{0, problem.split}, {problem.split, problem.columns - problem.split}};
}

void statistics_of(const Matrix& logits, const std::vector<Shard>& shards, const Inputs& inputs,
                   Machine& machine, Reals* log_prob, Reals& result) {
  const bool wide = is_wide(logits.dtype(), std::nullopt);
  const bool labelled = log_prob != nullptr && shards.size() == 1 && inputs.ids() != nullptr;
  Reals narrow_log_prob(inputs.count(), wide), total(3 * inputs.count(), wide);
  for (const Shard& shard : shards) {
    const Rows rows = logits.part(shard.begin, shard.count);
    Reals statistics(3 * inputs.count(), wide);
    machine.log_softmax({&rows, labelled ? inputs.ids() : nullptr, inputs.actives(),
                         statistics.data(), labelled ? narrow_log_prob.data() : nullptr, nullptr,
                         inputs.problem.threads});
    if (shard.begin == 0) {
      copy(statistics, total);
    } else {
      merge(total, statistics);
    }
  }
  copy(total, result);
  if (labelled) copy(narrow_log_prob, *log_prob);
}

// log_softmax, l1_distance and gradient in turn, over shards of columns where there are several.
void run_in_turn(const Inputs& inputs, Machine& machine, Results& results) {
  const Case& problem = inputs.problem;
  const std::vector<Shard> shards = shards_of(problem);
  results.is_fused = false;
  results.has_ce = shards.size() == 1 && inputs.ids() != nullptr;
  statistics_of(inputs.draft, shards, inputs, machine, &results.ce, results.draft_statistics);
  for (int64_t row = 0; row < inputs.count(); ++row) results.ce.set(row, -results.ce[row]);
  if (inputs.target) {
    statistics_of(*inputs.target, shards, inputs, machine, nullptr, results.target_statistics);
    for (const Shard& shard : shards) {
      const Rows draft = inputs.draft.part(shard.begin, shard.count);
      const Rows target = inputs.target->part(shard.begin, shard.count);
      Reals l1(inputs.count(), inputs.wide), sides(2 * inputs.count(), inputs.wide);
      machine.l1_distance({&draft, &target, inputs.actives(), results.draft_statistics.data(),
                           results.target_statistics.data(), l1.data(), sides.data(), nullptr,
                           problem.threads});
      for (auto [all, part] : {std::pair(&results.l1, &l1), std::pair(&results.sides, &sides)}) {
        for (int64_t i = 0; i < part->count(); ++i) {
          all->set(i, shard.begin == 0 ? (*part)[i] : (*all)[i] + (*part)[i]);
        }
      }
    }
  }
  Matrix& gradient = add_gradient(results, problem);
  Memory shard_labels(inputs.count() * 8);
  for (const Shard& shard : shards) {
    for (int64_t row = 0; row < inputs.count(); ++row) {
      int64_t label = inputs.labels[static_cast<size_t>(row)];
      if (label != kNoLabel && label >= 0 && label < problem.columns) {
        label -= shard.begin;
        if (label < 0 || label >= shard.count) label = kElsewhere;
      }
      std::memcpy(shard_labels.data() + 8 * row, &label, sizeof label);
    }
    const Rows draft = inputs.draft.part(shard.begin, shard.count);
    const Rows out = gradient.part(shard.begin, shard.count);
    std::optional<Rows> target;
    if (inputs.target) target = inputs.target->part(shard.begin, shard.count);
    const auto* ids = reinterpret_cast<const int64_t*>(shard_labels.data());
    machine.gradient(
        {&draft, target ? &*target : nullptr, inputs.ids() ? ids : nullptr, inputs.actives(),
         results.draft_statistics.data(), target ? results.target_statistics.data() : nullptr,
         target ? results.sides.data() : nullptr,
         std::isnan(inputs.weights().ce) ? nullptr : inputs.a.data(),
         std::isnan(inputs.weights().l1) ? nullptr : inputs.b.data(), &out, problem.threads});
  }
}

void run_weighted(const Inputs& inputs, Machine& machine, int threads, const Matrix& draft,
                  Results& results) {
  const Rows rows = draft.rows();
  std::optional<Rows> target, gradient;
  if (inputs.target) target = inputs.target->rows();
  if (results.gradient != nullptr) gradient = results.gradient->rows();
  const bool takes_weights = gradient.has_value() || machine.is_device();
  results.has_statistics = gradient ? machine.is_device() : true;
  const bool notes = results.has_statistics;
  machine.weighted(
      {&rows, target ? &*target : nullptr, inputs.ids(), inputs.actives(),
       takes_weights ? inputs.a.data() : nullptr, takes_weights ? inputs.b.data() : nullptr,
       results.ce.data(), results.l1.data(), notes ? results.draft_statistics.data() : nullptr,
       notes ? results.target_statistics.data() : nullptr, notes ? results.sides.data() : nullptr,
       gradient ? &*gradient : nullptr, nullptr, threads});
}

// --- Comparison ----------------------------------------------------------------------------------

class Comparison {
 public:
  Comparison(const Inputs& inputs, const Machine& machine)
      : inputs_(inputs),
        machine_(machine),
        half_unit_(half_unit(inputs.problem.draft)),
        half_smallest_(half_smallest(inputs.problem.draft)) {}

  void row(int64_t row, const std::vector<const Results*>& ways);

 private:
  const Case& problem() const { return inputs_.problem; }

  [[noreturn]] void fail(const std::string& what, double result, const Bounded& expected) const;
  void require(const std::string& what, double result, const Bounded& expected) const {
    if (!expected.holds(result)) fail(what, result, expected);
  }
  void require_zeros(const Results& results);
  void require_statistics(const std::string& what, const Reals& all, const Softmax& softmax,
                          bool is_exact);
  void require_gradient(const Results& results, const Softmax& draft, const Distance* distance);
  Bounded of_dtype(Bounded expected) const;

  const Inputs& inputs_;
  const Machine& machine_;
  const double half_unit_, half_smallest_;  // of the gradient's elements
  int64_t row_ = 0;
  const Results* results_ = nullptr;
  Precision precision_ = kNarrow;
};

void Comparison::fail(const std::string& what, double result, const Bounded& expected) const {
  std::ostringstream text;
  text.precision(17);
  text << what << " of row " << row_ << " by " << results_->way << " on " << machine_.name()
       << " is " << result << ", expected " << expected.value << " +- " << expected.error << "\n  "
       << problem().text();
  throw Mismatch(text.str());
}

void Comparison::require_zeros(const Results& results) {
  const Bounded zero{};
  if (results.has_ce) require("ce", results.ce[row_], zero);
  if (inputs_.target) require("l1", results.l1[row_], zero);
  if (results.has_statistics) {
    for (int64_t i = 3 * row_; i < 3 * row_ + 3; ++i) {
      require("draft statistics", results.draft_statistics[i], zero);
      if (inputs_.target) require("target statistics", results.target_statistics[i], zero);
    }
    for (int64_t i = 2 * row_; inputs_.target && i < 2 * row_ + 2; ++i) {
      require("sides", results.sides[i], zero);
    }
  }
  if (results.gradient == nullptr) return;
  const std::vector<char> zeros(
      static_cast<size_t>(problem().columns * element_size(problem().draft)));
  if (std::memcmp(results.gradient->element(row_, 0), zeros.data(), zeros.size()) == 0) return;
  for (int64_t j = 0; j < problem().columns; ++j) {
    require("gradient at column " + std::to_string(j), results.gradient->get(row_, j), zero);
  }
}

void Comparison::require_statistics(const std::string& what, const Reals& all,
                                    const Softmax& softmax, bool is_exact) {
  const double m = all[3 * row_], c = all[3 * row_ + 1], t = all[3 * row_ + 2];
  if (!softmax.has_distribution) {
    require(what + " z", m - m + c + t, {NAN, 0});
    return;
  }
  require(what + " m", m, {softmax.m, 0});
  if (is_exact) {
    require(what + " c", c, {softmax.c, 0});
    require(what + " T", t, softmax.t);
  } else {
    const double error = softmax.t.error + precision_.epsilon * softmax.z();
    require(what + " Z", c + t, {softmax.z(), error});
  }
}

Bounded Comparison::of_dtype(Bounded expected) const {
  expected.error += half_unit_ * (std::fabs(expected.value) + expected.error) + half_smallest_;
  return expected;
}

void Comparison::require_gradient(const Results& results, const Softmax& draft,
                                  const Distance* distance) {
  const int64_t label = inputs_.ids() ? inputs_.labels[static_cast<size_t>(row_)] : kNoLabel;
  const bool refused = label != kNoLabel && (label < 0 || label >= problem().columns);
  const double a = label == kNoLabel ? 0 : inputs_.a[row_];
  const double b = distance != nullptr ? inputs_.b[row_] : 0;
  const bool reads_ce = !std::isnan(inputs_.weights().ce) || results.is_fused;
  for (int64_t j = 0; j < problem().columns; ++j) {
    const double found = results.gradient->get(row_, j);
    if (refused && reads_ce) {
      require("gradient without a column", found, {NAN, 0});
      continue;
    }
    const auto i = static_cast<size_t>(j);
    const int sign = distance == nullptr ? 0 : distance->sign[i];
    const auto expected = [&](int s) {
      return of_dtype(gradient(draft, distance, j, s, j == label, a, b, precision_));
    };
    const Bounded by_sign = expected(sign);
    if (by_sign.holds(found)) continue;
    if (distance != nullptr && distance->unresolved[i] &&
        (expected(0).holds(found) || expected(1).holds(found) || expected(-1).holds(found))) {
      continue;
    }
    fail("gradient at column " + std::to_string(j) + " (label " + std::to_string(label) + ")",
         found, by_sign);
  }
}

void Comparison::row(int64_t row, const std::vector<const Results*>& ways) {
  row_ = row;
  if (inputs_.active[static_cast<size_t>(row)] == 0) {
    for (const Results* results : ways) {
      results_ = results;
      require_zeros(*results);
    }
    return;
  }
  const auto logits = [&](const Matrix& matrix) {
    std::vector<double> x;
    for (int64_t j = 0; j < problem().columns; ++j) x.push_back(matrix.get(row, j));
    return x;
  };
  const std::vector<double> x = logits(inputs_.draft);
  const std::vector<double> t = inputs_.target ? logits(*inputs_.target) : std::vector<double>{};
  const int64_t label = inputs_.ids() ? inputs_.labels[static_cast<size_t>(row)] : kNoLabel;
  const bool refused = label != kNoLabel && (label < 0 || label >= problem().columns);
  const bool same = problem().draft == problem().target;
  // The statistics of an operand alone have its own precision.
  const bool all_wide = problem().draft == DType::kFloat64 &&
                        (!inputs_.target || problem().target == DType::kFloat64);
  std::optional<Softmax> softmax, target;
  std::optional<Distance> distance;
  const Precision* known = nullptr;
  for (const Results* results : ways) {
    results_ = results;
    const bool wide = results->is_fused ? inputs_.wide : all_wide;
    const Precision* precision = wide ? &kWide : &kNarrow;
    if (precision != known) {
      known = precision;
      precision_ = *precision;
      softmax.emplace(x, precision_);
      if (inputs_.target) {
        target.emplace(t, precision_);
        distance.emplace(*softmax, *target, same, precision_);
      }
    }
    const Softmax& draft = *softmax;
    if (results->has_ce) {
      Bounded ce = refused ? Bounded{NAN, 0} : cross_entropy(draft, label, precision_);
      // Overflows to infinity where the largest float32 logits are the furthest apart.
      const bool wide_ce = results->is_fused ? inputs_.wide : problem().draft == DType::kFloat64;
      if (!wide_ce) ce.value = static_cast<double>(static_cast<float>(ce.value));
      require("ce", results->ce[row], ce);
    }
    if (distance) require("l1", results->l1[row], distance->l1);
    if (!distance && results->is_fused && !machine_.is_device()) {
      require("l1 without a target", results->l1[row], {});
    }
    if (results->has_statistics) {
      require_statistics("draft", results->draft_statistics, draft, true);
      if (target) {
        const bool is_exact = !machine_.is_device() || !results->is_fused;
        require_statistics("target", results->target_statistics, *target, is_exact);
        require("1 - S", results->sides[2 * row], distance->below_one);
        require("1 + S", results->sides[2 * row + 1], distance->above_one);
      }
    }
    if (results->gradient != nullptr) {
      require_gradient(*results, draft, distance ? &*distance : nullptr);
    }
  }
}

// --- Bits ----------------------------------------------------------------------------------------

void require_same_bits(const Inputs& inputs, const Machine& machine, const Results& results,
                       const Results& others) {
  for (int64_t row = 0; row < inputs.count(); ++row) {
    bool same = results.gradient == nullptr ||
                std::memcmp(results.gradient->element(row, 0), others.gradient->element(row, 0),
                            static_cast<size_t>(inputs.problem.columns *
                                                element_size(inputs.problem.draft))) == 0;
    const auto agree = [](double x, double y) { return x == y || (x != x && y != y); };
    same = same && agree(results.ce[row], others.ce[row]);
    same = same && (!inputs.target || agree(results.l1[row], others.l1[row]));
    if (!same) {
      throw Mismatch(std::string("row ") + std::to_string(row) + " by " + results.way + " and by " +
                     others.way + " on " + machine.name() + " differ\n  " + inputs.problem.text());
    }
  }
}

}  // namespace

void run(const Case& problem, Machine& machine) {
  Inputs inputs(problem, machine);
  const std::vector<char> draft_before = inputs.draft.contents();
  const std::vector<char> target_before =
      inputs.target ? inputs.target->contents() : std::vector<char>{};
  Results in_turn("the ops in turn", inputs, inputs.wide);
  Results visit("evaluation", inputs, inputs.wide);
  Results fused("the fused op", inputs, inputs.wide);
  Results one_thread("the fused op on one thread", inputs, inputs.wide);
  Results in_place("the op in place", inputs, inputs.wide);
  std::vector<const Results*> ways{&in_turn, &visit, &fused};

  inputs.forbid();
  run_in_turn(inputs, machine, in_turn);
  run_weighted(inputs, machine, problem.threads, inputs.draft, visit);
  add_gradient(fused, problem);
  run_weighted(inputs, machine, problem.threads, inputs.draft, fused);
  if (problem.threads > 1) {
    add_gradient(one_thread, problem);
    run_weighted(inputs, machine, 1, inputs.draft, one_thread);
  }
  std::optional<Matrix> overwritten;
  inputs.permit();
  if (problem.draft_layout.is_writable()) {
    overwritten.emplace(problem.draft, problem.sizes, problem.columns, problem.draft_layout);
    const auto size = static_cast<size_t>(problem.columns * element_size(problem.draft));
    for (int64_t row = 0; row < inputs.count(); ++row) {
      std::memcpy(overwritten->element(row, 0), inputs.draft.element(row, 0), size);
    }
    overwritten->forbid_all_but({});
    in_place.gradient = &*overwritten;
    inputs.forbid();
    run_weighted(inputs, machine, problem.threads, *overwritten, in_place);
    inputs.permit();
    ways.push_back(&in_place);
  }

  for (Results* results : {&in_turn, &fused, &one_thread, &in_place}) {
    if (results->gradient == nullptr) continue;
    results->gradient->permit();
    if (!results->gradient->surroundings_intact()) {
      throw Mismatch(std::string("written beside the gradient by ") + results->way + " on " +
                     machine.name() + "\n  " + problem.text());
    }
  }
  if (inputs.draft.contents() != draft_before ||
      (inputs.target && inputs.target->contents() != target_before)) {
    throw Mismatch("logits were written on " + machine.name() + "\n  " + problem.text());
  }
  if (problem.threads > 1) require_same_bits(inputs, machine, fused, one_thread);
  if (in_place.gradient != nullptr && !machine.is_device()) {
    require_same_bits(inputs, machine, in_place, fused);
  }
  Comparison comparison(inputs, machine);
  for (int64_t row = 0; row < inputs.count(); ++row) comparison.row(row, ways);
}

void run(const ScaleCase& problem, Machine& machine) {
  const Layout layout{problem.offset, 0, 0, false, 0};
  Matrix source(problem.dtype, {1}, problem.count, layout);
  Matrix fresh(problem.dtype, {1}, problem.count, layout);
  Random random(problem.seed);
  std::vector<double> before;
  for (int64_t i = 0; i < problem.count; ++i) {
    source.set(0, i, random.below(50) == 0 ? INFINITY : random.normal());
    before.push_back(source.get(0, i));
  }
  Matrix& destination = problem.in_place ? source : fresh;
  const bool wide_factor = problem.wide_factor && !machine.is_device();
  Reals factor(1, wide_factor);
  factor.set(0, problem.factor);
  source.forbid_all_but({});
  fresh.forbid_all_but({});
  machine.scale({source.element(0, 0), destination.element(0, 0), problem.dtype, problem.count,
                 factor.data(), wide_factor ? DType::kFloat64 : DType::kFloat32, problem.threads});
  source.permit();
  fresh.permit();
  for (int64_t i = 0; i < problem.count; ++i) {
    const double x = before[static_cast<size_t>(i)];
    const double product =
        problem.dtype == DType::kFloat64
            ? x * factor[0]
            : static_cast<double>(static_cast<float>(x) * static_cast<float>(factor[0]));
    Matrix expected(problem.dtype, {1}, 1, {});
    expected.set(0, 0, product);
    const double found = destination.get(0, i), wanted = expected.get(0, 0);
    if (found == wanted || (std::isnan(found) && std::isnan(wanted))) continue;
    throw Mismatch("scale by " + std::to_string(factor[0]) + " of " + name_of(problem.dtype) +
                   " gives " + std::to_string(found) + " for " + std::to_string(x) + " at " +
                   std::to_string(i) + " on " + machine.name());
  }
  if (!destination.surroundings_intact()) throw Mismatch("scale wrote beside its destination");
}

void run(const OrderedSumCase& problem, Machine& machine) {
  Reals values(problem.rows * problem.columns, problem.wide), sums(problem.columns, problem.wide);
  Random random(problem.seed);
  for (int64_t i = 0; i < values.count(); ++i) values.set(i, random.normal());
  machine.ordered_sum({values.data(), sums.data(), problem.wide ? DType::kFloat64 : DType::kFloat32,
                       problem.rows, problem.columns});
  for (int64_t column = 0; column < problem.columns; ++column) {
    double total = 0, magnitude = 0;
    for (int64_t row = 0; row < problem.rows; ++row) {
      total += values[row * problem.columns + column];
      magnitude += std::fabs(values[row * problem.columns + column]);
    }
    const double error = (problem.wide ? 1e-15 : 1e-7) * magnitude;
    if (std::fabs(sums[column] - total) <= error) continue;
    throw Mismatch("ordered_sum of " + std::to_string(problem.rows) + " x " +
                   std::to_string(problem.columns) + " gives " + std::to_string(sums[column]) +
                   ", expected " + std::to_string(total) + " on " + machine.name());
  }
}

void run(const ExponentialCase& problem, Machine& machine) {
  Reals x(problem.count, false), y(problem.count, false);
  Random random(problem.seed);
  for (int64_t i = 0; i < problem.count; ++i) x.set(i, -100 * random.uniform());
  const auto* arguments = static_cast<const float*>(x.data());
  if (!machine.exponential(arguments, static_cast<float*>(y.data()), problem.count)) return;
  for (int64_t i = 0; i < problem.count; ++i) {
    const double expected = std::exp(x[i]);
    if (std::fabs(y[i] - expected) <= 1.5 * 0x1p-23 * expected + 0x1p-126) continue;
    throw Mismatch("exp(" + std::to_string(x[i]) + ") is " + std::to_string(y[i]) + " on " +
                   machine.name());
  }
}

std::string Case::text() const {
  std::ostringstream text;
  const auto describe = [&](const char* name, const Layout& layout) {
    text << ", " << name << " layout {" << layout.offset << ", " << layout.padding << ", "
         << layout.gap << ", " << layout.reversed << ", " << layout.broadcast << "}";
  };
  text << "sizes {";
  for (size_t i = 0; i < sizes.size(); ++i) text << (i > 0 ? ", " : "") << sizes[i];
  text << "}, columns " << columns << ", draft " << name_of(draft) << ", target "
       << (has_target ? name_of(target) : "none");
  describe("draft", draft_layout);
  describe("target", target_layout);
  describe("gradient", gradient_layout);
  text << ", values " << static_cast<int>(draft_values) << " " << static_cast<int>(target_values)
       << ", labels " << static_cast<int>(labels) << ", activity " << static_cast<int>(activity)
       << ", weights " << weights << ", split " << split << ", threads " << threads << ", seed "
       << seed;
  return text.str();
}

}  // namespace dspark::native
