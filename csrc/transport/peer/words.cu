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

__global__ void await_kernel(const __grid_constant__ Board board, Word word, RankSet ranks,
                             uint32_t epoch) {
  admit_dependent();
  if (ranks >> threadIdx.x & 1) spin(board, own_word(board, word, threadIdx.x), epoch);
  await_predecessor();  // only now: others' words come whatever it still does
}

// Awaits and raises: where nothing is done in between, one kernel's way to the device is spared.
__global__ void close_kernel(const __grid_constant__ Board board, Word awaited, RankSet ranks,
                             Word word, uint32_t epoch) {
  admit_dependent();
  if (threadIdx.x < kMaxPeers && (ranks >> threadIdx.x & 1)) {
    spin(board, own_word(board, awaited, threadIdx.x), epoch);
  }
  await_predecessor();
  __syncthreads();  // all have come before any is told
  raise_everywhere(board, word, epoch);
}

}  // namespace

void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream) {
  start_kernel<<<1, kMaxPeers, 0, stream>>>(board, last_use, epoch);
  check(cudaGetLastError(), "start kernel launch");
}

void await_words(const Board& board, Word word, RankSet ranks, uint32_t epoch,
                 cudaStream_t stream) {
  if (ranks == 0) return;
  launch_dependent(await_kernel, 1, kMaxPeers, stream, board, word, ranks, epoch);
}

void await_and_finish(const Board& board, Word word, RankSet ranks, uint32_t epoch,
                      cudaStream_t stream) {
  launch_dependent(close_kernel, 1, kMaxPeers + kWarp, stream, board, word, ranks, Word::kFinished,
                   epoch);
}

void publish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  raise(board, Word::kResults, epoch, stream);
}

void finish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  raise(board, Word::kFinished, epoch, stream);
}

}  // namespace distca::transport::peer
