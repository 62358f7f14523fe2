// The fuzzer's inputs without its guidance, for compilers that have none: random bytes, or those of
// the files that are named.
//
//   native_random SECONDS [SEED]     native_random FILE...
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "numbers.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  using Clock = std::chrono::steady_clock;
  if (argc < 2) {
    std::cerr << "usage: " << argv[0] << " SECONDS [SEED] | FILE...\n";
    return 2;
  }
  char* end = nullptr;
  const double seconds = std::strtod(argv[1], &end);
  if (*end != '\0') {
    for (int i = 1; i < argc; ++i) {
      std::ifstream file(argv[i], std::ios::binary);
      const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
      LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    }
    return 0;
  }
  dspark::native::Random random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1);
  const auto begin = Clock::now();
  int64_t runs = 0;
  while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds) {
    std::vector<uint8_t> bytes(static_cast<size_t>(random.below(256)));
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(random.bits());
    // Written first, so that a run that ends in a sanitizer's report can be repeated.
    if (const char* path = std::getenv("DSPARK_NATIVE_LAST_INPUT")) {
      std::ofstream(path, std::ios::binary)
          .write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    ++runs;
  }
  std::cout << runs << " random inputs\n";
  return 0;
}
