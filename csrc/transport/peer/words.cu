#include "device.cuh"

namespace distca::transport::peer {
namespace {

constexpr int kWarp = 32;

__global__ void start_kernel(const __grid_constant__ Board board, uint32_t last_use,
                             uint32_t epoch) {
  admit_dependent();
  say_started(board, epoch);
  await_buffers(board, last_use);
}

__global__ void finish_kernel(const __grid_constant__ Board board, uint32_t epoch) {
  await_predecessor();
  admit_dependent();
  tell_finished(board, epoch);
}

__global__ void publish_kernel(const __grid_constant__ Board board, Call call) {
  await_predecessor();
  admit_dependent();
  tell_everyone(board, HostWord::kResults, call.epoch, [&](int rank) {
    store_release(call_word(board.words[rank], CallWord::kResults, call.epoch, board.rank),
                  call_word_of(call));
  });
}

__global__ void await_rows_kernel(const __grid_constant__ Board board, RankSet ranks, Call call) {
  const int rank = static_cast<int>(threadIdx.x);
  if (ranks >> rank & 1) spin_for_call(board, CallWord::kArrived, rank, call);
  admit_dependent();    // only now: its blocks would hold multiprocessors
  await_predecessor();  // only now: others' words come whatever it still does
}

// kMaxPeers threads for each word that ranks raise.
__global__ void await_results_kernel(const __grid_constant__ Board board, RankSet ranks,
                                     Call call) {
  const int rank = static_cast<int>(threadIdx.x % kMaxPeers);
  const CallWord word = threadIdx.x < kMaxPeers ? CallWord::kResults : CallWord::kReturned;
  if (ranks >> rank & 1) spin_for_call(board, word, rank, call);
  admit_dependent();
  await_predecessor();
}

// Waits for rows and needs nothing more: where nothing is done with them, one kernel's way to the
// device is spared.
__global__ void close_kernel(const __grid_constant__ Board board, RankSet ranks, Call call) {
  if (threadIdx.x < kMaxPeers && (ranks >> threadIdx.x & 1)) {
    spin_for_call(board, CallWord::kArrived, static_cast<int>(threadIdx.x), call);
  }
  await_predecessor();
  __syncthreads();  // all have come before any is told
  tell_finished(board, call.epoch);
}

}  // namespace

void start(const Board& board, uint32_t last_use, uint32_t epoch, cudaStream_t stream) {
  start_kernel<<<1, kMaxPeers, 0, stream>>>(board, last_use, epoch);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

void await_rows(const Board& board, RankSet ranks, const Call& call, cudaStream_t stream) {
  if (ranks == 0) return;
  launch_dependent(await_rows_kernel, 1, kMaxPeers, stream, board, ranks, call);
}

void await_results(const Board& board, RankSet ranks, const Call& call, cudaStream_t stream) {
  if (ranks == 0) return;
  launch_dependent(await_results_kernel, 1, 2 * kMaxPeers, stream, board, ranks, call);
}

void finish_on_arrival(const Board& board, RankSet ranks, const Call& call, cudaStream_t stream) {
  launch_dependent(close_kernel, 1, kMaxPeers + kWarp, stream, board, ranks, call);
}

void publish(const Board& board, const Call& call, cudaStream_t stream) {
  launch_dependent(publish_kernel, 1, kMaxPeers + kWarp, stream, board, call);
}

void finish(const Board& board, uint32_t epoch, cudaStream_t stream) {
  launch_dependent(finish_kernel, 1, kMaxPeers + kWarp, stream, board, epoch);
}

}  // namespace distca::transport::peer
