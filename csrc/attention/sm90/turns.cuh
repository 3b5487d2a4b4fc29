#pragma once

#include <algorithm>
#include <cstdint>

#include "launch.cuh"

// How blocks of a long launch let kernels on streams with a higher priority start. Persistent
// blocks, one for each multiprocessor, would occupy the device until the last item. So on a shared
// device, several blocks take the place of each persistent block, one after the other.
namespace distca::attention::sm90 {

// The time for which a block takes tickets. It is so long that the 6 us between two blocks of a
// multiprocessor hardly matter, and short compared with the transfers of a layer.
constexpr uint32_t kTurnNs = 500'000;

// Blocks of a launch. The first `num_in_turn` of them take tickets, one per item, for kTurnNs. The
// others take tickets until none are left. The blocks of a cluster share each ticket.
struct Blocks {
  int count;
  int32_t num_in_turn;
};

inline Blocks blocks_for(int32_t num_items, double flops, bool shares_device,
                         int cluster_blocks = 1) {
  constexpr double kFlopsPerNs = 4.5e3;  // of a multiprocessor, in long tasks
  const int num_persistent =
      std::min(num_items, num_multiprocessors() / cluster_blocks) * cluster_blocks;
  if (!shares_device || num_items == 0) return {num_persistent, 0};
  const double turns = flops / (num_persistent * kFlopsPerNs * kTurnNs);
  const auto most = static_cast<double>(num_items / (num_persistent / cluster_blocks));
  const int num_turns = static_cast<int>(std::clamp(turns, 1.0, most));
  return {num_turns * num_persistent, (num_turns - 1) * num_persistent};
}

__device__ __forceinline__ uint32_t timer_ns() {
  uint32_t ns;
  asm volatile("mov.u32 %0, %globaltimer_lo;" : "=r"(ns));
  return ns;
}

// The time for which a block takes tickets. It starts when a Turn is constructed.
class Turn {
 public:
  __device__ __forceinline__ explicit Turn(int32_t num_in_turn)
      : ends_(static_cast<int32_t>(blockIdx.x) < num_in_turn), begin_(timer_ns()) {}

  __device__ __forceinline__ bool is_over() const {
    return ends_ && timer_ns() - begin_ >= kTurnNs;
  }

 private:
  bool ends_;
  uint32_t begin_;
};

}  // namespace distca::attention::sm90
