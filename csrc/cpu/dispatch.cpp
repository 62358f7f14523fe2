// Chooses an instruction-set level, and holds what does not depend on one. Includes no kernel:
// what depends on a level's vector width is asked of that level.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace dspark::cpu {
namespace {

const Kernels* best() {
#ifdef DSPARK_HAVE_AVX2
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    return &kernels_avx2();
  }
#endif
  return &kernels_baseline();
}

const Kernels* chosen() {
  const char* wanted = std::getenv("DSPARK_EXT_CPU_LEVEL");
  if (wanted == nullptr || *wanted == '\0') return best();
  if (std::string(wanted) == kernels_baseline().name) return &kernels_baseline();
  if (std::string(wanted) == best()->name) return best();
  throw std::invalid_argument(
      std::string("DSPARK_EXT_CPU_LEVEL=") + wanted +
      " is not a level this processor and build have; choose from: " + available_levels());
}

}  // namespace

const Kernels& kernels() {
  static const Kernels* level = chosen();
  return *level;
}

const char* available_levels() {
  return best() == &kernels_baseline() ? "baseline" : "avx2 baseline";
}

void advise_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end =
      (reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes)) / page * page;
  // Only advice: where it is refused, the pages are small ones.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace dspark::cpu
