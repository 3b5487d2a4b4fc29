#include "launch.cuh"
#include "words.cuh"

namespace distca::transport::peer {
namespace {

constexpr int kWarp = 32;

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
  launch_dependent(raise_kernel, 1, kMaxPeers + kWarp, stream, board, word, epoch);
}

// kMaxPeers threads for each word that ranks raise.
__global__ void await_kernel(const __grid_constant__ Board board, Word first, Word second,
                             RankSet ranks, uint32_t epoch) {
  const int rank = static_cast<int>(threadIdx.x % kMaxPeers);
  const Word word = threadIdx.x < kMaxPeers ? first : second;
  if (ranks >> rank & 1) spin(board, own_word(board, word, rank), epoch);
  admit_dependent();    // only now: its blocks would hold multiprocessors
  await_predecessor();  // only now: others' words come whatever it still does
}

// Waits for rows and needs nothing more: where nothing is done with them, one kernel's way to the
// device is spared.
__global__ void close_kernel(const __grid_constant__ Board board, RankSet ranks, uint32_t epoch) {
  if (threadIdx.x < kMaxPeers && (ranks >> threadIdx.x & 1)) {
    spin(board, own_word(board, Word::kArrived, threadIdx.x), epoch);
  }
  await_predecessor();
  __syncthreads();  // all have come before any is told
  raise_everywhere(board, Word::kFinished, epoch);
}

}  // namespace

void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream) {
  start_kernel<<<1, kMaxPeers, 0, stream>>>(board, last_use, epoch);
  check(cudaGetLastError(), "start kernel launch");
}

void await_rows(const Board& board, RankSet ranks, uint32_t epoch, cudaStream_t stream) {
  if (ranks == 0) return;
  launch_dependent(await_kernel, 1, kMaxPeers, stream, board, Word::kArrived, Word::kArrived, ranks,
                   epoch);
}

void await_results(const Board& board, RankSet ranks, uint32_t epoch, cudaStream_t stream) {
  if (ranks == 0) return;
  launch_dependent(await_kernel, 1, 2 * kMaxPeers, stream, board, Word::kResults, Word::kReturned,
                   ranks, epoch);
}

void finish_on_arrival(const Board& board, RankSet ranks, uint32_t epoch, cudaStream_t stream) {
  launch_dependent(close_kernel, 1, kMaxPeers + kWarp, stream, board, ranks, epoch);
}

void publish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  raise(board, Word::kResults, epoch, stream);
}

void finish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  raise(board, Word::kFinished, epoch, stream);
}

}  // namespace distca::transport::peer
