#pragma once

#include <c10/cuda/CUDAException.h>

#include <cstdint>

#include "kernels.h"

// What kernels do with the words of boards, and how they follow each other.
namespace distca::transport::peer {

constexpr uint32_t kPauseNs = 32;  // between two looks at a word
constexpr uint32_t kLooks = 64;    // until the next one at the host's memory, which is far

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

// After all that this thread did, and all that it knows to have been done: by earlier kernels, and
// by other threads before a barrier.
__device__ __forceinline__ void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint64_t* word, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

// The count before. It comes after what this thread did and knows, and passes that on to those that
// count later. Of this device alone, as the blocks are: what goes on to other devices is released.
__device__ __forceinline__ uint32_t count_one(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}

__device__ __forceinline__ uint32_t* own_word(const Board& board, Word word, int64_t rank) {
  return board.words[board.rank] + word_index(word, rank);
}

__device__ __forceinline__ uint64_t* call_word(uint32_t* words, CallWord word, uint32_t epoch,
                                               int64_t rank) {
  return reinterpret_cast<uint64_t*>(words + kFirstCallWord) + call_word_index(word, epoch, rank);
}

__device__ __forceinline__ uint32_t* host_word(const Board& board, HostWord word) {
  return board.host + static_cast<int>(word);
}

__device__ __forceinline__ bool is_poisoned(uint32_t ahead) {
  return static_cast<int32_t>(ahead) >= static_cast<int32_t>(kPoison / 2);
}

// Whether this rank's call of the epoch was cut short: by an earlier kernel, or by a thread that
// poisoned a word which this one has seen.
__device__ __forceinline__ bool is_cut_short(const Board& board, uint32_t epoch) {
  return is_poisoned(load_relaxed(own_word(board, Word::kStarted, board.rank)) - epoch);
}

// Marks this rank's call as cut short: its results are invalid.
__device__ __forceinline__ void cut_short(const Board& board, uint32_t epoch) {
  store_release(own_word(board, Word::kStarted, board.rank), epoch + kPoison);
}

// Returns, between two looks at a word, whether the watchdog has given up.
__device__ __forceinline__ bool is_released(const Board& board, uint32_t look) {
  if (look > kLooks) __nanosleep(kPauseNs);
  return look % kLooks == 0 && load_acquire(host_word(board, HostWord::kReleased)) != 0;
}

// How far ahead of the epoch the word is when it stands for it. Where the watchdog has given up
// before, poisons it, for whoever else waits for it, and the call that this rank is in.
__device__ __forceinline__ uint32_t spin(const Board& board, uint32_t* word, uint32_t epoch) {
  uint32_t ahead = load_acquire(word) - epoch;
  for (uint32_t look = 1; static_cast<int32_t>(ahead) < 0; ++look) {
    if (is_released(board, look)) {
      cut_short(board, epoch);
      store_release(word, epoch + kPoison);
      return kPoison;
    }
    ahead = load_acquire(word) - epoch;
  }
  return ahead;
}

// Reports a mismatch to the host, the first ones only: any of them will do.
__device__ __forceinline__ void report_mismatch(const Board& board, int rank, uint32_t their_tag,
                                                uint32_t own_tag) {
  uint32_t* mismatch = host_word(board, HostWord::kMismatch);
  if (load_relaxed(mismatch) != 0) return;
  store_relaxed(host_word(board, HostWord::kTheirRank),
                static_cast<uint32_t>(board.first_rank + rank));
  store_relaxed(host_word(board, HostWord::kTheirTag), their_tag);
  store_relaxed(host_word(board, HostWord::kOwnTag), own_tag);
  store_release(mismatch, 1);
}

// Waits until a rank has raised its word for the epoch. Cuts the call short if the tag differs.
__device__ __forceinline__ void spin_for_call(const Board& board, CallWord word, int rank,
                                              const Call& call) {
  uint64_t* own = call_word(board.words[board.rank], word, call.epoch, rank);
  uint64_t found = load_acquire(own);
  for (uint32_t look = 1; static_cast<int32_t>(static_cast<uint32_t>(found) - call.epoch) < 0;
       ++look) {
    if (is_released(board, look)) return cut_short(board, call.epoch);
    found = load_acquire(own);
  }
  const auto tag = static_cast<uint32_t>(found >> 32);
  if (static_cast<uint32_t>(found) != call.epoch || tag == call.tag) return;
  cut_short(board, call.epoch);
  report_mismatch(board, rank, tag, call.tag);
}

// Runs on a block of more than kMaxPeers threads. The last one tells the host and the others tell
// the ranks, by raise(rank), because both take long. If the call was cut short, its results are
// invalid: the other ranks go on waiting until they learn why.
template <typename Raise>
__device__ __forceinline__ void tell_everyone(const Board& board, HostWord word, uint32_t epoch,
                                              Raise&& raise) {
  const int rank = static_cast<int>(threadIdx.x);
  const bool tells_host = threadIdx.x == blockDim.x - 1;
  if ((rank >= board.num_ranks && !tells_host) || is_cut_short(board, epoch)) return;
  if (tells_host) {
    store_relaxed(host_word(board, word), epoch);
  } else {
    raise(rank);
  }
}

__device__ __forceinline__ void tell_finished(const Board& board, uint32_t epoch) {
  tell_everyone(board, HostWord::kFinished, epoch, [&](int rank) {
    store_release(board.words[rank] + word_index(Word::kFinished, board.rank), epoch);
  });
}

// By all threads of a block. Returns whether nobody needs the buffers any more: not where the
// watchdog has given up.
__device__ __forceinline__ bool await_buffers(const Board& board, uint32_t last_use) {
  uint32_t ahead = 0;
  if (threadIdx.x < board.num_ranks) {
    ahead = spin(board, own_word(board, Word::kFinished, threadIdx.x), last_use);
  }
  return !__syncthreads_or(is_poisoned(ahead));
}

// By the last thread, which waits for no other word in a block of many. Nobody reads memory because
// of this word: it orders nothing.
__device__ __forceinline__ void say_started(const Board& board, uint32_t epoch) {
  if (threadIdx.x != blockDim.x - 1) return;
  uint32_t* started = own_word(board, Word::kStarted, board.rank);
  const uint32_t before = load_relaxed(started);
  if (is_poisoned(before - epoch)) return;
  atomicCAS(started, before, epoch);  // not over poison that has come since
  store_relaxed(host_word(board, HostWord::kStarted), epoch);
}

// Whether this is the last of `num_blocks` blocks to get here, for all of its threads. What all of
// them did then comes before what the last does, and what it releases.
__device__ __forceinline__ bool is_last(uint32_t* counter, uint32_t num_blocks) {
  __shared__ bool last;
  __syncthreads();
  if (num_blocks == 1) return true;
  if (threadIdx.x == 0) {
    last = count_one(counter) == num_blocks - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

// A dependent kernel comes to the device while the one before it in the stream still runs, which
// hides what its launch takes. All of its threads call await_predecessor before they end, and
// before they touch memory that the kernel before may access; words are excepted, because kernels
// wait for them whoever raises them. It returns when that kernel has ended and what it wrote is
// visible. That kernel waited in the same way, or is an ordinary one, which starts when all before
// it have ended; and an ordinary one that follows waits for all of this. Kernels of the model might
// skip the wait, so the first of a call, start or store, is ordinary; none of theirs is between it
// and ours.

// Lets the next kernel come now, if it is a dependent one.
__device__ __forceinline__ void admit_dependent() {
#if __CUDA_ARCH__ >= 900  // peer memory is for Hopper: nothing runs what is built for others
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

__device__ __forceinline__ void await_predecessor() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

template <typename... Parameters>
void launch_dependent(void (*kernel)(Parameters...), dim3 grid, int num_threads,
                      cudaStream_t stream, const Parameters&... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = 1;
  C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace distca::transport::peer
