#pragma once

#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "../registry.h"
#include "../transport.h"
#include "../watchdog.h"
#include "kernels.h"

namespace distca::transport::peer {

// Memory of this rank that all ranks of a group read and write, and the addresses of every rank's.
struct SharedMemory {
  at::Tensor tensor;  // uint8 [num_bytes], zeros at first
  std::vector<char*> addresses;
};

// Copies rows from a rank's tensors straight to the place in another rank's memory where kernels
// read them, and results back to a place in their home's memory. A round trip (trip.cpp) calls, in
// this order: open, send, await_arrivals, (work that reads and writes this rank's buffer),
// return_results, end. Every rank of the group makes the same calls. Every rank has a board and two
// buffers, which calls use in turns.
class PeerTransport : public Transport {
 public:
  explicit PeerTransport(PeerOpening opening);
  PeerTransport(const PeerTransport&) = delete;
  ~PeerTransport() override;

  // Sends the inputs of all parts together, and later the results of all parts together.
  std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo, const HeadParts& parts,
                                   const Where& where) override;

  // Throws DistBackendError when the group is lost. Starts a call that needs `num_bytes` of every
  // rank's buffer, as many on every rank. Where no call needed as many before, it waits for the
  // device and the other ranks, and throws GroupOutOfMemory on every rank if one has no memory;
  // then no call has started, and buffers stay as they are.
  // If the last call ran on another stream, the current stream waits for that call.
  void open(int64_t num_bytes, const Where& where);

  int64_t rank() const { return board_.rank; }
  // The buffer of `rank` that this call uses.
  char* buffer(int64_t rank) const {
    return buffers_.addresses[rank] + epoch_ % kNumBuffers * buffer_bytes_;
  }

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

  // Both buffers of this rank; undefined before the first call.
  at::Tensor shared_memory() const override { return buffers_.tensor; }

 private:
  static constexpr int64_t kNumBuffers = 2;

  SharedMemory share(int64_t num_bytes, const Where& where) const;
  Call call() const { return {epoch_, tag_}; }
  uint32_t* counters() const { return static_cast<uint32_t*>(counters_.mutable_data_ptr()); }

  // The call that used this call's buffers before.
  uint32_t last_use() const { return epoch_ - kNumBuffers; }

  // Both move rows and raise `word` of their ranks: before what the current stream does next, or
  // beside that.
  void store(const std::vector<Parcel>& parcels, CallWord word);
  void copy(std::vector<Parcel> parcels, CallWord word);

  PeerMembers members_;
  Meeting meet_;
  int64_t reserved_bytes_;
  SharedMemory buffers_;
  int64_t buffer_bytes_ = 0;  // of one buffer
  SharedMemory words_;
  HostWords host_words_;
  Board board_ = {};
  at::Tensor counters_;           // int32 [kMaxPeers + 1], zero between calls
  c10::cuda::CUDAStream copies_;  // one after the other: see copy
  c10::Event ready_{c10::kCUDA};  // of what is copied
  c10::Event sent_{c10::kCUDA};
  bool is_sending_ = false;  // until sent_
  std::optional<c10::cuda::CUDAStream> last_stream_;
  c10::Event last_call_{c10::kCUDA};
  uint32_t epoch_ = 0;
  uint32_t tag_ = 0;  // of the call: see tag_of
  std::shared_ptr<FailureBoard> failures_;
  Watchdog watchdog_;
};

}  // namespace distca::transport::peer
