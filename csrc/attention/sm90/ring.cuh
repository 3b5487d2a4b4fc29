#pragma once

#include "ptx.cuh"

namespace distca::attention::sm90 {

constexpr uint32_t kBarrierBytes = 8;

// Counts one arrival for the calling warp, once all of its threads are here.
__device__ __forceinline__ void arrive_as_warp(uint32_t barrier) {
  __syncwarp();
  if (elect_thread()) barrier_arrive(barrier);
}

// Barriers of stages that are used in turn, one barrier per stage. Use i, counted from 0, is of
// stage i % kStages and ends phase i / kStages of its barrier.
template <int kStages>
struct Ring {
  uint32_t barriers;
  uint32_t which;  // index of the first one in `barriers`

  static __device__ __forceinline__ uint32_t stage(uint32_t i) { return i % kStages; }
  static __device__ __forceinline__ uint32_t phase(uint32_t i) { return i / kStages & 1; }

  __device__ __forceinline__ uint32_t barrier(uint32_t i) const {
    return barriers + kBarrierBytes * (which + stage(i));
  }

  // Waits until use i has ended.
  __device__ __forceinline__ void wait(uint32_t i) const { barrier_wait(barrier(i), phase(i)); }
  __device__ __forceinline__ void wait_idle(uint32_t i) const {
    barrier_wait_idle(barrier(i), phase(i));
  }
  // Waits until use i - kStages has ended, so that use i may begin. The first uses do not wait.
  __device__ __forceinline__ void wait_before(uint32_t i) const {
    barrier_wait(barrier(i), phase(i) ^ 1);
  }

  __device__ __forceinline__ void arrive(uint32_t i) const { barrier_arrive(barrier(i)); }
  __device__ __forceinline__ void arrive_as_warp(uint32_t i) const {
    sm90::arrive_as_warp(barrier(i));
  }
};

// Returns the ring whose first barrier has index `which` in `barriers`.
template <int kStages = 2>
__device__ __forceinline__ Ring<kStages> ring_at(uint32_t barriers, uint32_t which) {
  return {barriers, which};
}

}  // namespace distca::attention::sm90
