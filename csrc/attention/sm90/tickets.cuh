#pragma once

#include "kernels.h"
#include "ptx.cuh"

// Which item a persistent block takes next, and when its rows are there. A kernel with kVisiting
// computes both parts of a call, one without only the first: choosing costs it 2 % of its speed.
namespace distca::attention::sm90 {

constexpr int32_t kNoItem = -1;

__device__ __forceinline__ bool has_arrived(const Arrivals& arrivals, int32_t run) {
  if (!arrivals.flags) return true;
  const FlagRange range = arrivals.of_run[run];
  for (int32_t i = range.begin; i < range.end; ++i) {
    const uint32_t ahead = load_from_others(arrivals.flags + i) - arrivals.epoch;
    if (static_cast<int32_t>(ahead) < 0) return false;
  }
  return true;
}

// Until the rows that a run's tasks read are here. By the thread that then copies them; one that
// learns of it from this thread calls fence_arrivals.
__device__ __forceinline__ void await(const Arrivals& arrivals, int32_t run) {
  if (!arrivals.flags) return;
  while (!has_arrived(arrivals, run)) __nanosleep(100);
  fence_arrivals();
}

// Takes a ticket: of visiting items if the next one's rows are there and no other block is quicker,
// else of home items. What it stands for is known when settle_item is called, so that the answer's
// way can be hidden.
template <bool kVisiting, typename Part>
__device__ __forceinline__ int32_t take_ticket(const Part (&parts)[kNumTickets]) {
  if constexpr (kVisiting) {
    const Part& visiting = parts[1];
    const int32_t next = load_relaxed(visiting.ticket);
    if (next < visiting.num_items && has_arrived(visiting.arrivals, visiting.run_of(next)) &&
        atomicCAS(visiting.ticket, next, next + 1) == next) {
      return ~next;
    }
  }
  return atomicAdd(parts[0].ticket, 1);
}

// Which of all items it is, home's and then visiting's, or kNoItem. When home items are used up, it
// is the next visiting one.
template <bool kVisiting, typename Part>
__device__ __forceinline__ int32_t settle_item(int32_t ticket, const Part (&parts)[kNumTickets]) {
  const int32_t num_home = parts[0].num_items, num_visiting = parts[1].num_items;
  if constexpr (!kVisiting) return ticket < num_home ? ticket : kNoItem;
  if (ticket >= num_home) ticket = ~atomicAdd(parts[1].ticket, 1);
  if (ticket >= 0) return ticket;
  return ~ticket < num_visiting ? num_home + ~ticket : kNoItem;
}

}  // namespace distca::attention::sm90
