#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../failures.h"
#include "kernels.h"
#include "memory.h"
#include "watchdog.h"

namespace distca::transport::peer {

// A point in a stream that other streams wait for.
class Event {
 public:
  Event();
  Event(const Event&) = delete;
  ~Event();
  void record(cudaStream_t stream);
  void block(cudaStream_t stream) const;

 private:
  cudaEvent_t event_ = nullptr;
};

// Copies one after the other, beside those of other queues.
struct Queue {
  c10::cuda::CUDAStream stream;
  std::unique_ptr<Event> end;
  bool in_use;  // by the current call
};

// Rows straight from a rank's tensors to the place in another's memory where they are read, and
// results straight from there to their rows. One call after the other: begin, send, (work that
// reads and writes this rank's buffer), fetch. Every rank of the group makes the same calls.
class PeerTransport {
 public:
  // Gives up a call in which nothing moves for `timeout_s`.
  PeerTransport(Members members, std::shared_ptr<FailureBoard> failures, double timeout_s);

  // Throws DistBackendError when the group is lost. Starts a call that needs `num_bytes` of every
  // rank's buffer, as many on every rank.
  void begin(int64_t num_bytes, const Where& where);

  int64_t rank() const { return memory_.board().rank; }
  char* buffer(int64_t rank) const { return memory_.buffer(rank, epoch_); }

  // Arrival flags of this rank: a kernel that reads rows waits until theirs stand for epoch().
  const uint32_t* flags() const { return memory_.board().words[memory_.board().rank] + kFirstFlag; }
  uint32_t epoch() const { return epoch_; }

  // Sends parcels, ordered by rank, whose flags count from kFirstFlag, once nobody uses the buffers
  // any more; the current stream waits for that too. Few bytes are stored before what the stream
  // does next; many travel beside it, by copy engines.
  void send(std::vector<Parcel> parcels);

  // The current stream waits for arrival flags, of rows that a later kernel reads without waiting.
  void await_arrivals(std::vector<FlagRange> ranges);

  // After the current stream has written this call's results: fetches those of others, and ends the
  // call. The tensors that were sent are free afterwards.
  void fetch(const std::vector<Gather>& gathers, Addend addend);

  int64_t buffer_bytes() const { return memory_.total_bytes(); }

 private:
  void copy(const std::vector<Parcel>& parcels);

  PeerMemory memory_;
  at::Tensor counters_;        // int32 [kMaxPeers + 1], zero between calls
  std::vector<Queue> queues_;  // of copies, kQueuesPerRank for each rank
  Event ready_;                // of what is sent
  uint32_t epoch_ = 0;
  Watchdog watchdog_;
};

}  // namespace distca::transport::peer
