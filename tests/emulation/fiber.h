// A stack of its own and the registers of whoever left it. The first entry goes through ucontext;
// later switches through _setjmp and _longjmp, which save the same registers without the system
// call that swapcontext makes each time. AddressSanitizer has to be told of every switch and does
// not understand a jump between stacks, so that there swapcontext does all of them.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__)
#define DSPARK_EMULATION_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define DSPARK_EMULATION_ASAN 1
#endif
#endif

namespace dspark::emulation {

class Fiber {
 public:
  // One without a stack stands for the thread that the others are switched to from.
  Fiber() = default;
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Makes the next switch to this fiber call `entry`, which must not return, on a stack whose
  // upper part, more than kernels use, is filled with 0xFF. What ran there before is abandoned.
  void prepare(void (*entry)());

  // Leaves the fiber that runs, which is `from`, for `to`; returns when somebody switches back.
  static void switch_between(Fiber& from, Fiber& to);
  // Leaves it for good.
  [[noreturn]] static void leave(Fiber& from, Fiber& to);
  // Must be the first thing that `entry` does. `first` is the fiber without a stack if that is
  // where the switch came from, and null otherwise.
  static void entered(Fiber* first);

 private:
  [[noreturn]] void resume();

  bool fresh_ = false;
  jmp_buf registers_;
  char* mapping_ = nullptr;
  size_t mapping_bytes_ = 0;
  char* stack_ = nullptr;
  size_t stack_bytes_ = 0;
  ucontext_t context_;
};

}  // namespace dspark::emulation
