#pragma once

#include <cstdint>

#include "kernels.h"

// What kernels do with the words of boards.
namespace distca::transport::peer {

constexpr uint32_t kPauseNs = 32;  // between two looks at a word

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

// How far ahead of the epoch the word is when it stands for it.
__device__ __forceinline__ uint32_t spin(const uint32_t* word, uint32_t epoch) {
  uint32_t ahead = load_acquire(word) - epoch;
  while (static_cast<int32_t>(ahead) < 0) {
    __nanosleep(kPauseNs);
    ahead = load_acquire(word) - epoch;
  }
  return ahead;
}

__device__ __forceinline__ bool is_poisoned(uint32_t ahead) {
  return static_cast<int32_t>(ahead) >= static_cast<int32_t>(kPoison / 2);
}

// Results of a call that was cut short are worth nothing: the others go on waiting, until they
// learn why.
__device__ __forceinline__ void raise_everywhere(const Board& board, Word word, uint32_t epoch) {
  const int rank = static_cast<int>(threadIdx.x);
  const uint32_t* started = board.words[board.rank] + word_index(Word::kStarted, board.rank);
  if (rank >= board.num_ranks || is_poisoned(load_acquire(started) - epoch)) return;
  store_release(board.words[rank] + word_index(word, board.rank), epoch);
}

// By all threads of a block.
__device__ __forceinline__ void await_buffers(const Board& board, uint32_t last_use) {
  const uint32_t* finished = board.words[board.rank] + word_index(Word::kFinished, 0);
  if (threadIdx.x < board.num_ranks) spin(finished + threadIdx.x, last_use);
  __syncthreads();
}

// By the last thread, which waits for no other word in a block of many. The watchdog reads no
// memory because of this word: it orders nothing.
__device__ __forceinline__ void say_started(const Board& board, uint32_t epoch) {
  uint32_t* started = board.words[board.rank] + word_index(Word::kStarted, board.rank);
  if (threadIdx.x != blockDim.x - 1 || is_poisoned(load_acquire(started) - epoch)) return;
  store_relaxed(started, epoch);
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

}  // namespace distca::transport::peer
