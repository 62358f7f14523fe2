#include "memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__SANITIZE_ADDRESS__)
#define DSPARK_NATIVE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DSPARK_NATIVE_ASAN 1
#endif
#endif
#ifdef DSPARK_NATIVE_ASAN
#include <sanitizer/asan_interface.h>
#elif __has_include(<valgrind/memcheck.h>)
#include <valgrind/memcheck.h>
#define DSPARK_NATIVE_VALGRIND 1
#endif

namespace dspark::native {
namespace {

std::set<const Memory*>& existing() {
  static std::set<const Memory*> memories;
  return memories;
}

// Elements from the first one to the end of the last row.
int64_t span(const std::vector<int64_t>& offsets, int64_t columns, int64_t offset) {
  int64_t end = offset;
  for (const int64_t row : offsets) end = std::max(end, row + columns);
  return end;
}

std::vector<int64_t> strides_of(const std::vector<int64_t>& sizes, int64_t columns,
                                const Layout& layout) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = std::max<int64_t>(columns + layout.padding, 1);
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t d = layout.reversed ? i : sizes.size() - 1 - i;
    strides[d] = layout.broadcast >> d & 1 ? 0 : stride;
    stride = stride * sizes[d] + layout.gap;
  }
  return strides;
}

std::vector<int64_t> offsets_of(const std::vector<int64_t>& sizes,
                                const std::vector<int64_t>& strides, int64_t offset) {
  std::vector<int64_t> offsets{offset};
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<int64_t> next;
    for (const int64_t outer : offsets) {
      for (int64_t i = 0; i < sizes[d]; ++i) next.push_back(outer + i * strides[d]);
    }
    offsets = std::move(next);
  }
  return offsets;
}

}  // namespace

Memory::Memory(int64_t bytes)
    : data_(static_cast<char*>(std::malloc(static_cast<size_t>(bytes)))), bytes_(bytes) {
  if (data_ == nullptr) throw std::bad_alloc();
  std::memset(data_, 0xFF, static_cast<size_t>(bytes));
  existing().insert(this);
}

Memory::~Memory() {
  existing().erase(this);
  std::free(data_);
}

const std::set<const Memory*>& Memory::all() { return existing(); }

void Memory::forbid(int64_t begin, int64_t end) {
  forbidden_.emplace_back(begin, end);
#if defined(DSPARK_NATIVE_ASAN)
  ASAN_POISON_MEMORY_REGION(data_ + begin, static_cast<size_t>(end - begin));
#elif defined(DSPARK_NATIVE_VALGRIND)
  VALGRIND_MAKE_MEM_NOACCESS(data_ + begin, end - begin);
#endif
}

void Memory::permit() {
  for (const auto& [begin, end] : forbidden_) {
#if defined(DSPARK_NATIVE_ASAN)
    ASAN_UNPOISON_MEMORY_REGION(data_ + begin, static_cast<size_t>(end - begin));
#elif defined(DSPARK_NATIVE_VALGRIND)
    VALGRIND_MAKE_MEM_DEFINED(data_ + begin, end - begin);
#else
    (void)begin, (void)end;
#endif
  }
  forbidden_.clear();
}

void Memory::forget_contents() const {
#if defined(DSPARK_NATIVE_VALGRIND)
  VALGRIND_MAKE_MEM_UNDEFINED(data_, bytes_);
#endif
}

Reals::Reals(int64_t count, bool wide) : size_(wide ? 8 : 4), memory_(count * size_) {}

double Reals::operator[](int64_t i) const {
  return decode(memory_.data() + i * size_, size_ == 8 ? DType::kFloat64 : DType::kFloat32);
}

void Reals::set(int64_t i, double value) {
  encode(value, size_ == 8 ? DType::kFloat64 : DType::kFloat32, memory_.data() + i * size_);
}

Matrix::Matrix(DType dtype, std::vector<int64_t> sizes, int64_t columns, const Layout& layout)
    : dtype_(dtype),
      columns_(columns),
      sizes_(std::move(sizes)),
      strides_(strides_of(sizes_, columns, layout)),
      offsets_(offsets_of(sizes_, strides_, layout.offset)),
      memory_(span(offsets_, columns, layout.offset) * element_size(dtype)) {}

char* Matrix::element(int64_t row, int64_t column) const {
  return memory_.data() + (offsets_[static_cast<size_t>(row)] + column) * element_size(dtype_);
}

Rows Matrix::part(int64_t begin, int64_t count) const {
  const int64_t first = offsets_.empty() ? 0 : offsets_[0] + begin;
  const auto address = reinterpret_cast<uintptr_t>(memory_.data() + first * element_size(dtype_));
  return Rows(address, dtype_, sizes_, strides_, count);
}

template <class F>
void Matrix::for_each_gap(const std::vector<uint8_t>& marked, F&& f) const {
  std::vector<int64_t> begins;
  for (size_t i = 0; i < offsets_.size(); ++i) {
    if (marked.empty() || marked[i] != 0) begins.push_back(offsets_[i]);
  }
  std::sort(begins.begin(), begins.end());
  const int64_t size = element_size(dtype_);
  int64_t end = 0;
  for (const int64_t begin : begins) {
    if (begin > end) f(end * size, begin * size);
    end = std::max(end, begin + columns_);
  }
  if (end * size < memory_.bytes()) f(end * size, memory_.bytes());
}

void Matrix::forbid_all_but(const std::vector<uint8_t>& marked) {
  for_each_gap(marked, [&](int64_t begin, int64_t end) { memory_.forbid(begin, end); });
}

bool Matrix::surroundings_intact() const {
  bool intact = true;
  for_each_gap({}, [&](int64_t begin, int64_t end) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(memory_.data());
    intact = intact && std::count(bytes + begin, bytes + end, 0xFF) == end - begin;
  });
  return intact;
}

}  // namespace dspark::native
