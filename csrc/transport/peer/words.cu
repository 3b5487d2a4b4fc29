#include <algorithm>

#include "launch.cuh"
#include "words.cuh"

namespace distca::transport::peer {
namespace {

constexpr int kMaxRanges = 64;  // of words to wait for, in one launch

__global__ void start_kernel(const __grid_constant__ Board board, uint32_t last_use,
                             uint32_t epoch) {
  admit_dependent();
  say_started(board, epoch);
  await_buffers(board, last_use);
}

__global__ void raise_kernel(const __grid_constant__ Board board, Word word, uint32_t epoch) {
  await_predecessor();
  admit_dependent();
  raise_everywhere(board, word, epoch);
}

void raise(const Board& board, Word word, uint32_t epoch, cudaStream_t stream) {
  launch_dependent(raise_kernel, 1, kMaxPeers, stream, board, word, epoch);
}

struct AwaitArguments {
  Board board;
  uint32_t epoch;
  int num_ranges;
  struct {
    uint32_t first, last;
  } ranges[kMaxRanges];
};

__global__ void await_kernel(const __grid_constant__ AwaitArguments a) {
  await_predecessor();
  admit_dependent();
  for (int i = 0; i < a.num_ranges; ++i) {
    for (uint32_t word = a.ranges[i].first + threadIdx.x; word < a.ranges[i].last;
         word += blockDim.x) {
      spin(a.board, a.board.words[a.board.rank] + word, a.epoch);
    }
  }
}

// The same words in as few ranges as hold them: those of one range are looked at together.
std::vector<FlagRange> merged(std::vector<FlagRange> ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const FlagRange& a, const FlagRange& b) { return a.first < b.first; });
  std::vector<FlagRange> result;
  for (const FlagRange& range : ranges) {
    if (range.first == range.last) continue;
    if (result.empty() || result.back().last < range.first) {
      result.push_back(range);
    } else {
      result.back().last = std::max(result.back().last, range.last);
    }
  }
  return result;
}

}  // namespace

void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream) {
  start_kernel<<<1, kMaxPeers, 0, stream>>>(board, last_use, epoch);
  check(cudaGetLastError(), "start kernel launch");
}

void await_words(const Board& board, const std::vector<FlagRange>& ranges, uint32_t epoch,
                 cudaStream_t stream) {
  const std::vector<FlagRange> awaited = merged(ranges);
  for (auto next = awaited.begin(); next != awaited.end();) {
    AwaitArguments arguments = {board, epoch, 0, {}};
    for (; next != awaited.end() && arguments.num_ranges < kMaxRanges; ++next) {
      arguments.ranges[arguments.num_ranges++] = {static_cast<uint32_t>(next->first),
                                                  static_cast<uint32_t>(next->last)};
    }
    launch_dependent(await_kernel, 1, kMaxPeers, stream, arguments);
  }
}

void publish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  raise(board, Word::kResults, epoch, stream);
}

void finish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  raise(board, Word::kFinished, epoch, stream);
}

}  // namespace distca::transport::peer
