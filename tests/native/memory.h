// Memory as a kernel is handed it: of exactly the bytes that belong to it, so that a sanitizer
// sees the first byte too far, and inaccessible where a kernel has no business. What was not
// written is 0xFF in every byte, a NaN in each format.
#pragma once

#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "numbers.h"
#include "rows.h"

namespace dspark::native {

class Memory {
 public:
  explicit Memory(int64_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  char* data() const { return data_; }
  int64_t bytes() const { return bytes_; }

  // Makes a part inaccessible, as far as the tool that watches can express it.
  void forbid(int64_t begin, int64_t end);
  void permit();
  // Has valgrind report a use of what was not written since.
  void forget_contents() const;

  // All that exist now, for a machine that wants to know what its kernels may touch.
  static const std::set<const Memory*>& all();

 private:
  char* data_;
  int64_t bytes_;
  std::vector<std::pair<int64_t, int64_t>> forbidden_;
};

// A per-row array of Real: double where `wide`, else float.
class Reals {
 public:
  Reals(int64_t count, bool wide);

  double operator[](int64_t i) const;
  void set(int64_t i, double value);
  int64_t count() const { return memory_.bytes() / size_; }
  void* data() const { return memory_.data(); }

 private:
  int64_t size_;
  Memory memory_;
};

// Where the rows of a matrix stand.
struct Layout {
  int64_t offset = 0;      // elements before the first row
  int64_t padding = 0;     // between rows; negative for rows that overlap
  int64_t gap = 0;         // between groups of rows
  bool reversed = false;   // the first leading dimension is the one that runs fastest
  unsigned broadcast = 0;  // bit d: dimension d has stride 0

  bool is_writable() const { return padding >= 0 && broadcast == 0; }
};

// Logits or a gradient.
class Matrix {
 public:
  Matrix(DType dtype, std::vector<int64_t> sizes, int64_t columns, const Layout& layout);

  DType dtype() const { return dtype_; }
  int64_t count() const { return static_cast<int64_t>(offsets_.size()); }
  int64_t columns() const { return columns_; }
  Rows rows() const { return part(0, columns_); }
  Rows part(int64_t begin, int64_t count) const;

  char* element(int64_t row, int64_t column) const;
  double get(int64_t row, int64_t column) const { return decode(element(row, column), dtype_); }
  void set(int64_t row, int64_t column, double x) { encode(x, dtype_, element(row, column)); }

  // Leaves nothing accessible but the rows that are marked (empty: all of them).
  void forbid_all_but(const std::vector<uint8_t>& marked);
  void permit() { memory_.permit(); }
  std::vector<char> contents() const { return {memory_.data(), memory_.data() + memory_.bytes()}; }
  // Whether what belongs to no row is as it was made.
  bool surroundings_intact() const;

 private:
  // Calls f(begin, end) for the bytes between the rows that are marked, and around them.
  template <class F>
  void for_each_gap(const std::vector<uint8_t>& marked, F&& f) const;

  DType dtype_;
  int64_t columns_;
  std::vector<int64_t> sizes_, strides_;
  std::vector<int64_t> offsets_;  // of each row, in elements
  Memory memory_;
};

}  // namespace dspark::native
