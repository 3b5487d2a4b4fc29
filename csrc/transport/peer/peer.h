#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "../transport.h"
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

// Copies rows from a rank's tensors straight to the place in another rank's memory where kernels
// read them, and results back to a place in their home's memory. A round trip (trip.cpp) calls, in
// this order: open, send, await_arrivals, (work that reads and writes this rank's buffer),
// return_results, end. Every rank of the group makes the same calls.
class PeerTransport : public Transport {
 public:
  // Buffers take `reserved_bytes` at least. Gives up a call in which nothing moves for `timeout_s`.
  PeerTransport(Members members, Meeting meet, int64_t reserved_bytes,
                std::shared_ptr<FailureBoard> failures, double timeout_s);
  PeerTransport(const PeerTransport&) = delete;
  ~PeerTransport() override;

  std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo, const Where& where) override;

  // Throws DistBackendError when the group is lost. Starts a call that needs `num_bytes` of every
  // rank's buffer, as many on every rank. Where no call needed as many before, it waits for the
  // device and the other ranks, and throws as PeerMemory::grow; then no call has started.
  // If the last call ran on another stream, the current stream waits for that call.
  void open(int64_t num_bytes, const Where& where);

  int64_t rank() const { return memory_.board().rank; }
  char* buffer(int64_t rank) const { return memory_.buffer(rank, epoch_); }

  // Sends parcels, one a rank, once nobody uses the buffers any more; the current stream waits for
  // that too. Few bytes are stored before what the stream does next; many travel beside it, by a
  // copy engine.
  void send(std::vector<Parcel> parcels);

  // The current stream waits for what travels beside it: the tensors that were sent are free. `end`
  // does it; for calls that do not get there.
  void await_sent();

  // The current stream waits for what these ranks send.
  void await_arrivals(RankSet ranks);

  // After the current stream has written this call's results: tells the others and returns them, as
  // send does.
  void return_results(std::vector<Parcel> parcels);

  // The current stream takes what has been returned to this rank, or is its own. Ends the call: the
  // tensors that were sent are free.
  void end(const std::vector<Gather>& gathers, Addend addend);

  // As await_arrivals and end, where nothing is done between them and nothing is returned.
  void end_on_arrival(RankSet ranks);

  int64_t buffer_bytes() const { return memory_.total_bytes(); }
  // Both buffers of this rank; undefined before the first call.
  const at::Tensor& buffers() const { return memory_.tensor(); }

 private:
  void grow(int64_t num_bytes, const Where& where);
  void follow_last_call();
  Call call() const { return {epoch_, tag_}; }

  // The call that used this call's buffers before.
  uint32_t last_use() const { return epoch_ - PeerMemory::kNumBuffers; }

  // Both move rows and raise `word` of their ranks: before what the current stream does next, or
  // beside that.
  void store(const std::vector<Parcel>& parcels, CallWord word);
  void copy(std::vector<Parcel> parcels, CallWord word);

  PeerMemory memory_;
  at::Tensor counters_;           // int32 [kMaxPeers + 1], zero between calls
  c10::cuda::CUDAStream copies_;  // one after the other: see copy
  Event ready_;                   // of what is copied
  Event sent_;
  bool is_sending_ = false;  // until sent_
  std::optional<c10::cuda::CUDAStream> last_stream_;
  Event last_call_;
  uint32_t epoch_ = 0;
  uint32_t tag_ = 0;  // of the call: see tag_of
  std::string group_;
  std::shared_ptr<Channel> channel_;
  BoardWatch watch_;
  Watchdog watchdog_;
};

}  // namespace distca::transport::peer
