// Drives a libFuzzer target where the compiler has no libFuzzer, by the same flags:
// -max_total_time=SECONDS and -seed=N. An input that fails stays in ./last-input; names of files
// run the inputs in them instead.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed);

namespace {

using Bytes = std::vector<uint8_t>;

constexpr size_t kMaxSize = 8192;  // bytes of an input
constexpr size_t kNumKept = 64;    // inputs from which others are made
constexpr const char* kLastInput = "last-input";

// Kept before each run, because a sanitizer ends the process.
void keep(const Bytes& input) {
  std::ofstream file(kLastInput, std::ios::binary | std::ios::trunc);
  file.write(reinterpret_cast<const char*>(input.data()),
             static_cast<std::streamsize>(input.size()));
}

bool run_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    std::fprintf(stderr, "cannot read %s\n", path.c_str());
    return false;
  }
  const Bytes bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
  return true;
}

void fuzz(double seconds, unsigned int seed) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  std::mt19937 random(seed);
  std::vector<Bytes> kept(kNumKept);
  int64_t num_runs = 0;
  for (; Clock::now() < end; ++num_runs) {
    Bytes input = kept[random() % kNumKept];
    const size_t size = input.size();
    input.resize(kMaxSize);
    input.resize(LLVMFuzzerCustomMutator(input.data(), size, kMaxSize, random()));
    keep(input);
    LLVMFuzzerTestOneInput(input.data(), input.size());
    kept[random() % kNumKept] = std::move(input);
  }
  std::remove(kLastInput);
  std::printf("%lld inputs in %.0f s\n", static_cast<long long>(num_runs), seconds);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string time_flag = "-max_total_time=", seed_flag = "-seed=";
  double seconds = 60;
  unsigned int seed = 1;
  bool has_files = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument.starts_with(time_flag)) {
      seconds = std::stod(argument.substr(time_flag.size()));
    } else if (argument.starts_with(seed_flag)) {
      seed = static_cast<unsigned int>(std::stoul(argument.substr(seed_flag.size())));
    } else {
      if (!run_file(argument)) return 2;
      has_files = true;
    }
  }
  if (has_files) return 0;
  fuzz(seconds, seed);
  return 0;
}
