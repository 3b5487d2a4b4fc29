#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <vector>

#include "../host_words.h"

// Kernels that read and write other ranks' memory. Plain structs, no tensors. Every function only
// enqueues work on `stream` and throws c10::Error for a CUDA error.
namespace distca::transport::peer {

constexpr int kMaxPeers = 64;

// Words that ranks raise for each other. They only grow (modulo 2^32) and nobody resets them: a
// word stands for an epoch if it is that epoch or later.
struct Board {
  uint32_t* words[kMaxPeers];  // [num_ranks] each rank's board, as this process sees it
  uint32_t* host;              // this rank's HostWords, as its device sees them
  int rank;
  int num_ranks;
  int first_rank;  // see PeerMembers
};

// Words of a board, by the rank that raises them. kFinished: the rank needs nothing more of the
// others. kStarted, only for this rank: the call that it is in.
enum class Word { kFinished, kStarted };
constexpr int64_t word_index(Word word, int64_t rank) {
  return static_cast<int64_t>(word) * kMaxPeers + rank;
}

// A call as ranks compare it.
struct Call {
  uint32_t epoch;
  uint32_t tag;
};

// Words of 64 bits that follow: the epoch, and above it the call's tag. They say, for each rank,
// that its rows have arrived here, and that its results are written and returned. Each word has two
// places, used in turn: a place is used again once all ranks have finished its previous call.
enum class CallWord { kArrived, kResults, kReturned };
constexpr int64_t call_word_index(CallWord word, uint32_t epoch, int64_t rank) {
  return (2 * static_cast<int64_t>(word) + epoch % 2) * kMaxPeers + rank;
}
constexpr int64_t kFirstCallWord = 2 * kMaxPeers;  // in words of 32 bits
constexpr int64_t kNumWords =
    kFirstCallWord + 2 * call_word_index(CallWord::kReturned, 1, kMaxPeers);

constexpr uint64_t call_word_of(const Call& call) {
  return call.epoch | static_cast<uint64_t>(call.tag) << 32;
}

// A kernel that has to stop waiting for a word raises it about this far ahead of its epoch.
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

// Rows for one rank.
struct Parcel {
  int64_t rank;
  std::vector<RowBlock> blocks;

  int64_t num_bytes() const {
    int64_t sum = 0;
    for (const RowBlock& rows : blocks) sum += rows.num_bytes();
    return sum;
  }
};

using RankSet = uint64_t;  // bit r is rank r's
static_assert(kMaxPeers <= 64);

// Publishes that this rank is in the call of `epoch`, and waits until no rank needs what was done
// in `last_use`.
void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream);

// Waits until rows of these ranks have arrived for the call's epoch. If a rank sent rows of another
// call, cuts this rank's call short and tells the host.
void await_rows(const Board& board, RankSet ranks, const Call& call, cudaStream_t stream);

// Waits until these ranks have published and returned their results, and checks them likewise.
void await_results(const Board& board, RankSet ranks, const Call& call, cudaStream_t stream);

// Does await_rows, and then finish.
void finish_on_arrival(const Board& board, RankSet ranks, const Call& call, cudaStream_t stream);

// Does start; then stores rows, at most one parcel for each rank, and raises this rank's words on
// the targets' boards to the call. `counters` are kMaxPeers zeros, and zero again afterwards.
void store(const Board& board, const std::vector<Parcel>& parcels, CallWord word, uint32_t last_use,
           const Call& call, uint32_t* counters, cudaStream_t stream);

// Publishes that this rank's results of the call are written.
void publish(const Board& board, const Call& call, cudaStream_t stream);

// Publishes that this rank needs nothing more of the others in the call of `epoch`.
void finish(const Board& board, uint32_t epoch, cudaStream_t stream);

// dst = rows of one rank, or dst += rows of several, added in order in float32 and rounded once.
struct Gather {
  struct Source {
    const char* data;  // in this rank's memory
    int64_t rank;      // that brought it there
  };
  char* dst;
  int64_t dst_stride;  // bytes between rows of dst; rows of sources are consecutive
  int64_t num_rows;
  int64_t row_bytes;            // a multiple of 4, or of 16 if `adds`
  std::vector<Source> sources;  // kMaxPeers at most
  bool adds;                    // if true, rows of dst are consecutive

  int64_t num_bytes() const { return num_rows * row_bytes; }
  bool has_gaps() const { return num_rows > 1 && dst_stride != row_bytes; }
};

enum class Addend { kBfloat16, kFloat16 };

// Takes results once all have been published and returned, and then does finish. If this rank's
// board is poisoned, rows become NaN, and nothing is published. `counter` is zero, and zero again
// afterwards.
void fetch(const Board& board, const std::vector<Gather>& gathers, Addend addend, const Call& call,
           uint32_t* counter, cudaStream_t stream);

}  // namespace distca::transport::peer
