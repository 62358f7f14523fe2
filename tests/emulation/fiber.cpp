#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>

#ifdef DSPARK_EMULATION_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace dspark::emulation {
namespace {

// Instrumented frames are several times as large, and their reports are written on this stack.
#ifdef DSPARK_EMULATION_ASAN
constexpr size_t kStackBytes = 256 << 10;
#else
constexpr size_t kStackBytes = 64 << 10;
#endif
constexpr size_t kPoisonedBytes = 12 << 10;

}  // namespace

Fiber::~Fiber() {
  if (mapping_ == nullptr) return;
#ifdef DSPARK_EMULATION_ASAN
  ASAN_UNPOISON_MEMORY_REGION(stack_, stack_bytes_);
#endif
  munmap(mapping_, mapping_bytes_);
}

void Fiber::prepare(void (*entry)()) {
  if (mapping_ == nullptr) {
    // The lowest page stays inaccessible, so that an overflow stops instead of spoiling others.
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    mapping_bytes_ = page + kStackBytes;
    void* mapping = mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = static_cast<char*>(mapping);
    if (mprotect(mapping, page, PROT_NONE) != 0) throw std::bad_alloc();
    stack_ = mapping_ + page;
    // Stacks that end at the same place of a page would all share a few sets of the caches.
    static size_t stacks = 0;
    stack_bytes_ = kStackBytes - stacks++ % 13 * 320;
  }
#ifdef DSPARK_EMULATION_ASAN
  ASAN_UNPOISON_MEMORY_REGION(stack_, stack_bytes_);  // of frames that were abandoned
#endif
  std::memset(stack_ + stack_bytes_ - kPoisonedBytes, 0xFF, kPoisonedBytes);
  getcontext(&context_);
  context_.uc_stack.ss_sp = stack_;
  context_.uc_stack.ss_size = stack_bytes_;
  context_.uc_link = nullptr;
  makecontext(&context_, entry, 0);
  fresh_ = true;
}

#ifdef DSPARK_EMULATION_ASAN

void Fiber::switch_between(Fiber& from, Fiber& to) {
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, to.stack_, to.stack_bytes_);
  swapcontext(&from.context_, &to.context_);
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
}

void Fiber::leave(Fiber& from, Fiber& to) {
  __sanitizer_start_switch_fiber(nullptr, to.stack_, to.stack_bytes_);
  swapcontext(&from.context_, &to.context_);
  std::abort();
}

void Fiber::entered(Fiber* first) {
  const void* bottom = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &bytes);
  if (first == nullptr) return;
  first->stack_ = static_cast<char*>(const_cast<void*>(bottom));
  first->stack_bytes_ = bytes;
}

#else

void Fiber::resume() {
  if (fresh_) {
    fresh_ = false;
    setcontext(&context_);
  }
  _longjmp(registers_, 1);
}

void Fiber::switch_between(Fiber& from, Fiber& to) {
  if (_setjmp(from.registers_) == 0) to.resume();
}

void Fiber::leave(Fiber&, Fiber& to) { to.resume(); }

void Fiber::entered(Fiber*) {}

#endif

}  // namespace dspark::emulation
