#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "../watchdog.h"
#include "board_watch.h"
#include "kernels.h"
#include "memory.h"

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
  bool in_use;    // by the current call
  bool is_ready;  // waits for the event that its copies start after
};

// Rows straight from a rank's tensors to the place in another's memory where they are read, and
// results straight from there to their rows. One call after the other: begin, send, (work that
// reads and writes this rank's buffer), collect, end. Every rank of the group makes the same calls.
class PeerTransport {
 public:
  // Gives up a call in which nothing moves for `timeout_s`.
  PeerTransport(Members members, Meeting meet, std::shared_ptr<FailureBoard> failures,
                double timeout_s);

  // Throws DistBackendError when the group is lost. Starts a call that needs `num_bytes` of every
  // rank's buffer, as many on every rank. Where no call needed as many before, it waits for the
  // device and the other ranks, and throws as PeerMemory::grow; then no call has started.
  void begin(int64_t num_bytes, const Where& where);

  int64_t rank() const { return memory_.board().rank; }
  char* buffer(int64_t rank) const { return memory_.buffer(rank, epoch_); }

  // Sends parcels, ordered by rank, whose flags count from kFirstFlag, once nobody uses the buffers
  // any more; the current stream waits for that too. Few bytes are stored before what the stream
  // does next; many travel beside it, by copy engines.
  void send(std::vector<Parcel> parcels);

  // The current stream waits for arrival flags, of rows that a later kernel reads without waiting.
  void await_arrivals(std::vector<FlagRange> ranges);

  // After the current stream has written this call's results: tells the others, and takes theirs
  // as they come. Many bytes travel beside what the stream does next, by copy engines.
  void collect(std::vector<Gather> gathers);

  // The current stream waits for what is collected; sums are formed now, of rows that stand here.
  // Ends the call: the tensors that were sent are free.
  void end(Addend addend);

  int64_t buffer_bytes() const { return memory_.total_bytes(); }
  // Both buffers of this rank; undefined before the first call.
  const at::Tensor& buffers() const { return memory_.tensor(); }

 private:
  void grow(int64_t num_bytes, const Where& where);

  void copy(const std::vector<Parcel>& parcels);

  // Copies results here when their ranks have published them; `bytes_to_add` of addends.
  void pull(int64_t bytes_to_add);

  // Copies that follow start after what the current stream has been given.
  void restart_queues();

  // Whether the queue was not ready since restart_queues.
  bool make_ready(Queue& queue);

  PeerMemory memory_;
  at::Tensor counters_;          // int32 [kMaxPeers + 1], zero between calls
  std::vector<Queue> queues_;    // of copies, kQueuesPerRank for each rank
  Event ready_;                  // of what is copied
  std::vector<Gather> gathers_;  // of the current call
  at::Tensor addends_;           // that have been copied here
  uint32_t epoch_ = 0;
  BoardWatch watch_;
  Watchdog watchdog_;
};

}  // namespace distca::transport::peer
