#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

// Kernels that read and write other ranks' memory. Plain structs, no torch. Every function only
// enqueues work on `stream` and throws std::runtime_error for a CUDA error.
namespace distca::transport::peer {

constexpr int kMaxPeers = 64;

// Words that ranks raise for each other. They only grow (modulo 2^32) and nobody resets them: a
// word stands for an epoch if it is that epoch or later.
struct Board {
  uint32_t* words[kMaxPeers];  // [num_ranks] each rank's board, as this process sees it
  uint32_t* host;              // this rank's HostWords, as its device sees them
  int rank;
  int num_ranks;
};

// Of a board: who has written its results, who needs nothing of others any more, and, for this rank
// alone, which call it is in. Then the arrival flags of the rows that come here.
enum class Word { kResults, kFinished, kStarted };
constexpr int64_t word_index(Word word, int64_t rank) {
  return static_cast<int64_t>(word) * kMaxPeers + rank;
}
constexpr int64_t kFirstFlag = 3 * kMaxPeers;
constexpr int64_t kMaxFlags = int64_t{1} << 18;

// In this rank's host memory: its own words of the board again, and whether its watchdog has given
// up. Then kernels stop waiting.
enum class HostWord { kResults, kFinished, kStarted, kReleased };

// A word about this far ahead of its epoch was raised by a kernel that had to stop waiting for it.
constexpr uint32_t kPoison = uint32_t{1} << 30;

// Rows from anywhere to anywhere: [num_rows] of row_bytes each.
struct RowBlock {
  const char* src;
  char* dst;
  int64_t src_stride;  // bytes
  int64_t dst_stride;
  int64_t num_rows;
  int64_t row_bytes;  // a multiple of 4, like addresses and strides

  int64_t num_bytes() const { return num_rows * row_bytes; }
  bool has_gaps() const {
    return num_rows > 1 && (src_stride != row_bytes || dst_stride != row_bytes);
  }
};

// Rows for one rank, and the arrival flag there that stands for them: a word of its board.
struct Parcel {
  int64_t rank;
  std::vector<RowBlock> blocks;
  int64_t flag;
};

// Words [first, last) of a board.
struct FlagRange {
  int64_t first;
  int64_t last;
};

// Says that this rank is in the call of `epoch`, and waits until nobody needs what was done in
// `last_use`.
void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream);

// Waits until words of this rank's board stand for `epoch`.
void await_words(const Board& board, const std::vector<FlagRange>& ranges, uint32_t epoch,
                 cudaStream_t stream);

// As start; then stores rows and raises the parcels' flags to `epoch`. Parcels are ordered by rank.
// `counters` are kMaxPeers zeros, and zero again afterwards.
void store(const Board& board, const std::vector<Parcel>& parcels, uint32_t last_use,
           uint32_t epoch, uint32_t* counters, cudaStream_t stream);

// Says that this rank's results of `epoch` are written.
void publish(const Board& board, uint32_t epoch, cudaStream_t stream);

// Says that this rank needs nothing more of the others in the call of `epoch`.
void finish(const Board& board, uint32_t epoch, cudaStream_t stream);

// dst = rows of one rank, or dst += rows of several, added in order in float32 and rounded once; or
// nothing, where they have been copied already.
enum class Taking { kCopy, kAdd, kNothing };
struct Gather {
  struct Source {
    const char* data;
    int64_t rank;
  };
  char* dst;
  int64_t num_bytes;  // consecutive on both sides; a multiple of 4, of 16 where it adds
  std::vector<Source> sources;
  Taking taking;
};

enum class Addend { kBfloat16, kFloat16 };

// Takes results as their ranks publish them, and says that nothing more is needed. Where this
// rank's board is poisoned, rows become NaN and the others are told nothing. `counter` is zero, and
// zero again afterwards.
void fetch(const Board& board, const std::vector<Gather>& gathers, Addend addend, uint32_t epoch,
           uint32_t* counter, cudaStream_t stream);

}  // namespace distca::transport::peer
