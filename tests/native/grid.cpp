// Runs the kernels over a grid of inputs that stand for the kinds of trouble: every element type
// and mixture, widths around each block and chunk, strides, special values, ignored and inactive
// rows, several threads, gradients that bypass the caches.
//
//   native_grid PART [FIRST [LAST]]
//
// PART is `small` (for a slow observer), `threads` (for one that watches threads), `fast` or
// `full`; the numbers are those of the first and the last case that are run.
#include <cstdlib>
#include <iostream>
#include <map>
#include <string>
#include <variant>

#include "case.h"

namespace dspark::native {
namespace {

enum class Part { kSmall, kThreads, kFast, kFull };

using AnyCase = std::variant<Case, ScaleCase, OrderedSumCase, ExponentialCase>;

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};

const Layout kContiguous{};
const Layout kLayouts[] = {
    kContiguous,          {1, 0, 0, false, 0},  // a storage offset that no vector likes
    {3, 5, 0, false, 0},                        // columns of a wider buffer
    {0, 0, 7, false, 0},                        // dimensions that do not join
    {2, 1, 3, true, 0},                         // transposed
    {8, 8, 8, false, 0},                        // aligned, with room between
    {0, 0, 0, false, 1},                        // the first dimension expanded
    {1, 3, 0, false, 2},                        // the last one
    {0, 0, 0, false, 3},                        // both: one row for all
    {5, -1, 0, false, 0},                       // rows that share a column
};

struct Pair {
  DType draft, target;
  bool has_target;
};

std::vector<Pair> all_pairs(bool is_device) {
  std::vector<Pair> pairs;
  for (const DType draft : kDTypes) {
    if (is_device && draft == DType::kFloat64) continue;
    pairs.push_back({draft, draft, false});
    for (const DType target : kDTypes) {
      if (!is_device || target != DType::kFloat64) pairs.push_back({draft, target, true});
    }
  }
  return pairs;
}

class Grid {
 public:
  Grid(Part part, bool is_device) : part_(part), is_device_(is_device) {}

  std::vector<AnyCase> cases();

 private:
  // The next case, in which whatever is not set takes the next of its choices.
  Case next(const Pair& pair, int64_t columns);
  template <class T, size_t n>
  const T& take(const T (&choices)[n], uint64_t stride) const {
    return choices[turn_ / stride % n];
  }
  const Layout& writable_layout(uint64_t stride) const { return kLayouts[turn_ / stride % 6]; }
  void widths();
  void values();
  void layouts();
  void labels_and_weights();
  void threads();
  void past_the_caches();
  void few_rows_past_the_caches();
  void other_ops();
  void large_device_rows();

  const Part part_;
  const bool is_device_;
  uint64_t turn_ = 0;
  std::vector<AnyCase> cases_;
};

Case Grid::next(const Pair& pair, int64_t columns) {
  static const std::vector<int64_t> kSizes[] = {{6}, {2, 3}, {3, 2}, {1, 5}, {2, 2, 2}};
  static const Activity kActivity[] = {Activity::kMost, Activity::kNone, Activity::kMost,
                                       Activity::kAll};
  ++turn_;
  Case problem;
  problem.sizes = take(kSizes, 1);
  problem.columns = columns;
  problem.draft = pair.draft;
  problem.target = pair.target;
  problem.has_target = pair.has_target;
  problem.draft_layout = take(kLayouts, 1);
  problem.target_layout = take(kLayouts, 3);
  problem.gradient_layout = writable_layout(2);
  problem.activity = take(kActivity, 1);
  problem.weights = static_cast<int>(turn_ % kWeights.size());
  problem.split = turn_ % 3 == 0 ? columns / 2 : turn_ % 3 == 1 ? 0 : 1;
  problem.threads = is_device_ ? 1 : static_cast<int>(1 + turn_ % 3);
  problem.seed = turn_;
  return problem;
}

void Grid::widths() {
  std::vector<int64_t> columns{1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 257};
  if (part_ == Part::kSmall) {
    columns = {1, 2, 7, 9, 31, 33, 257, 2049};
  } else if (!is_device_) {
    columns.insert(columns.end(), {511, 513, 2047, 2048, 2049, 4097});
  } else {
    columns.insert(columns.end(), {1000, 2049});
  }
  if (part_ == Part::kFull) columns.insert(columns.end(), {4095, 4096, 6145, 8191, 8193});
  for (const int64_t width : columns) {
    for (const Pair& pair : all_pairs(is_device_)) cases_.push_back(next(pair, width));
  }
}

void Grid::values() {
  const std::vector<int64_t> columns = part_ == Part::kFull
                                           ? std::vector<int64_t>{1, 7, 40, 257, 2051, 4099}
                                           : std::vector<int64_t>{7, 257};
  for (const int64_t width : columns) {
    for (int kind = 0; kind < kValues; ++kind) {
      for (const Pair& pair : all_pairs(is_device_)) {
        if (part_ != Part::kFull && pair.has_target && pair.draft != pair.target &&
            (turn_ + static_cast<uint64_t>(kind)) % 3 != 0) {
          ++turn_;
          continue;
        }
        Case problem = next(pair, width);
        problem.draft_values = static_cast<Values>(kind);
        problem.target_values =
            turn_ % 2 == 0 ? Values::kMixed : static_cast<Values>((kind * 5 + turn_) % kValues);
        cases_.push_back(problem);
      }
    }
  }
}

void Grid::layouts() {
  for (const DType dtype : kDTypes) {
    if (is_device_ && dtype == DType::kFloat64) continue;
    for (const Layout& draft : kLayouts) {
      for (const Layout& target : kLayouts) {
        Case problem = next({dtype, dtype, true}, 131);
        problem.draft_layout = draft;
        problem.target_layout = target;
        problem.sizes = {3, 2};
        cases_.push_back(problem);
      }
    }
  }
}

void Grid::labels_and_weights() {
  for (int labels = 0; labels < kLabels; ++labels) {
    for (int activity = 0; activity < kActivities; ++activity) {
      for (size_t weights = 0; weights < kWeights.size(); ++weights) {
        const auto pairs = all_pairs(is_device_);
        Case problem = next(pairs[turn_ % pairs.size()], 70);
        problem.labels = static_cast<Labels>(labels);
        problem.activity = static_cast<Activity>(activity);
        problem.weights = static_cast<int>(weights);
        cases_.push_back(problem);
      }
    }
  }
  for (const std::vector<int64_t>& sizes :
       {std::vector<int64_t>{0}, {3, 0}, {}, {1, 1, 1}, {2, 1, 2, 1, 2}}) {
    for (const Pair& pair : all_pairs(is_device_)) {
      Case problem = next(pair, 33);
      problem.sizes = sizes;
      problem.draft_layout = problem.target_layout = kContiguous;
      cases_.push_back(problem);
    }
  }
}

// As many columns and rows as it takes for several threads to be used: rows dealt out, and columns
// of a row where there are fewer rows than threads.
void Grid::threads() {
  struct Shape {
    int64_t rows, columns;
  };
  std::vector<Shape> shapes{{1, 70001}, {2, 40001}, {5, 16385}, {70, 1001}};
  if (part_ == Part::kFull) shapes.insert(shapes.end(), {{1, 151936}, {2, 49152}, {900, 129}});
  for (const Shape& shape : shapes) {
    for (const Pair& pair : all_pairs(false)) {
      const bool mixed = pair.has_target && pair.draft != pair.target;
      if (part_ != Part::kFull && (mixed || pair.draft == DType::kFloat16) && ++turn_ % 4 != 0) {
        continue;
      }
      Case problem = next(pair, shape.columns);
      problem.sizes = {shape.rows};
      problem.threads = 2 + static_cast<int>(turn_ / 2 % 2);
      problem.draft_values = take({Values::kNormal, Values::kMixed, Values::kScattered}, 1);
      problem.draft_layout = writable_layout(1);
      problem.split = turn_ % 2 == 0 ? 0 : shape.columns / 3;
      cases_.push_back(problem);
    }
  }
}

// Gradients of 8 MiB and more, from few logits: rows are expanded, most are inactive.
void Grid::past_the_caches() {
  for (const DType draft : kDTypes) {
    for (const int64_t columns : {int64_t{33}, int64_t{2049}, int64_t{6177}, int64_t{70001}}) {
      if (part_ != Part::kFull && (columns == 2049) != (draft == DType::kBFloat16)) continue;
      for (const DType target : kDTypes) {
        const bool wide = target == DType::kFloat64 && draft != DType::kFloat16;
        if (target != draft && !(part_ == Part::kFull && wide)) continue;
        Case problem = next({draft, target, turn_ % 4 != 0}, columns);
        problem.sizes = {(int64_t{8} << 20) / (columns * element_size(draft)) + 1};
        problem.draft_layout = turn_ % 2 == 0 ? writable_layout(3) : kLayouts[6];
        problem.target_layout = kLayouts[6];
        problem.draft_values = problem.target_values = Values::kNormal;
        problem.activity = Activity::kFew;
        problem.threads = 1 + static_cast<int>(turn_ % 3);
        problem.split = 0;
        cases_.push_back(problem);
      }
    }
  }
}

// Fewer rows than threads, each of megabytes: one row's gradient is streamed by the threads that
// share the next row, and begins where no vector does.
void Grid::few_rows_past_the_caches() {
  for (const DType dtype : kDTypes) {
    Case problem = next({dtype, dtype, true}, (int64_t{4} << 20) / element_size(dtype) + 5);
    problem.sizes = {2};
    problem.draft_layout = kContiguous;
    problem.target_layout = kLayouts[8];
    problem.gradient_layout = {1, 0, 0, false, 0};
    problem.draft_values = problem.target_values = Values::kNormal;
    problem.activity = Activity::kAll;
    problem.threads = 3;
    problem.split = 0;
    cases_.push_back(problem);
  }
}

void Grid::other_ops() {
  for (const DType dtype : kDTypes) {
    if (is_device_ && dtype == DType::kFloat64) continue;
    for (const int64_t count : {0, 1, 7, 2048, 2049, 5001}) {
      for (const double factor : {1.0, 0.37, -3e4, 0.0}) {
        ++turn_;
        ScaleCase problem;
        problem.dtype = dtype;
        problem.count = count;
        problem.factor = factor;
        problem.offset = static_cast<int64_t>(turn_ % 4);
        problem.wide_factor = turn_ % 3 == 0;
        problem.in_place = turn_ % 2 == 0;
        problem.seed = turn_;
        cases_.push_back(problem);
      }
    }
  }
  for (const int64_t rows : {0, 1, 7, 300}) {
    for (const int64_t columns : {0, 1, 3, 40}) {
      cases_.push_back(OrderedSumCase{false, rows, columns, ++turn_});
      cases_.push_back(OrderedSumCase{true, rows, columns, ++turn_});
    }
  }
  if (is_device_) return;
  for (const int64_t count : {0, 1, 5, 31, 32, 33, 100, 10000}) {
    cases_.push_back(ExponentialCase{count, ++turn_});
  }
  if (part_ == Part::kSmall) return;
  ScaleCase large;
  large.count = 100000;
  large.factor = 1.5;
  large.threads = 3;
  cases_.push_back(large);
}

// Rows that clusters of blocks hold on chip, and rows that they do not.
void Grid::large_device_rows() {
  for (const int64_t columns : {int64_t{4104}, int64_t{16384}, int64_t{49152}, int64_t{32003}}) {
    for (const Pair& pair : all_pairs(true)) {
      if (pair.has_target && pair.draft != pair.target && part_ != Part::kFull) continue;
      if (columns > 20000 && part_ == Part::kFast) continue;
      Case problem = next(pair, columns);
      problem.sizes = {5};
      if (turn_ % 2 == 0) problem.draft_layout = problem.target_layout = kLayouts[5];
      cases_.push_back(problem);
    }
  }
}

std::vector<AnyCase> Grid::cases() {
  if (part_ == Part::kSmall) {
    widths();
    other_ops();
    return cases_;
  }
  if (part_ == Part::kThreads) {
    if (!is_device_) {
      threads();
      few_rows_past_the_caches();
    }
    return cases_;
  }
  widths();
  values();
  layouts();
  labels_and_weights();
  other_ops();
  if (is_device_) {
    large_device_rows();
  } else {
    threads();
    past_the_caches();
    if (part_ == Part::kFull) few_rows_past_the_caches();
  }
  return cases_;
}

int run_grid(Part part, size_t first, size_t last) {
  size_t count = 0, failures = 0;
  for (const auto& machine : machines()) {
    const std::vector<AnyCase> cases = Grid(part, machine->is_device()).cases();
    for (size_t i = first; i < cases.size() && i <= last; ++i) {
      ++count;
      try {
        std::visit([&](const auto& problem) { run(problem, *machine); }, cases[i]);
      } catch (const std::exception& error) {
        ++failures;
        std::cout << "case " << i << ": " << error.what() << "\n";
      }
    }
    std::cout << machine->name() << ": " << cases.size() << " cases\n";
  }
  std::cout << count << " runs, " << failures << " failures\n";
  return failures > 0 ? 1 : 0;
}

}  // namespace
}  // namespace dspark::native

int main(int argc, char** argv) {
  using dspark::native::Part;
  const std::map<std::string, Part> parts{{"small", Part::kSmall},
                                          {"threads", Part::kThreads},
                                          {"fast", Part::kFast},
                                          {"full", Part::kFull}};
  const auto part = parts.find(argc > 1 ? argv[1] : "");
  if (part == parts.end()) {
    std::cerr << "usage: " << argv[0] << " small|threads|fast|full [FIRST [LAST]]\n";
    return 2;
  }
  const auto number = [&](int i, size_t otherwise) {
    return argc > i ? static_cast<size_t>(std::strtoull(argv[i], nullptr, 10)) : otherwise;
  };
  const size_t first = number(2, 0);
  return dspark::native::run_grid(part->second, first, number(3, argc > 2 ? first : SIZE_MAX));
}
