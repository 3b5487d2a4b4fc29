#pragma once

#ifdef DISTCA_WITH_CUDA
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>
#include <vector>

#include "../registry.h"
#include "../watchdog.h"
#include "exchange_timer.h"

namespace distca::transport {

// Watches the streams of a device that wait for exchanges of a process group. Aborting the group's
// communicator releases them. Until then the watchdog does not use the CUDA driver: see HostWords.
class StreamWaits {
 public:
  StreamWaits(const Opening& opening, c10::Device device);
  StreamWaits(const StreamWaits&) = delete;
  ~StreamWaits();

  // Throws as Watchdog::check.
  void check() { watchdog_.check(); }

  // Notes that the next exchange begins after the work on the device's current stream.
  void begin(const Where& where);
  // Notes that a stream has just been told to wait for the oldest exchange that is under way. In
  // that exchange, this rank sends or receives `num_bytes`.
  void add(const Pending& pending, int64_t num_bytes);
  // Keeps the memory of rows that leave while the current stream goes on without waiting for them.
  // With record_stream instead, every layer would take new memory until the device has caught up
  // with the host, which can be many layers ahead.
  void hold(const at::Tensor& sent);
  // Lets go of all rows that are held after the current stream was told to wait for a later
  // exchange. Exchanges of a group end in order, so that stream may use their memory again.
  void release();
  // Lets go of all rows that are held, although no stream waits for them.
  void release_later();
  // Returns the stream that waits for every exchange and marks its end. No other work runs on it.
  c10::cuda::CUDAStream marks() const {
    return c10::cuda::getStreamFromExternal(marks_, device_.index());
  }
  // See Transport.
  std::vector<ExchangeTime> take_times() { return timer_.take(); }

  // Returns the seal for a call's rows.
  Seal seal(const Where& where);

 private:
  HostWords words_;
  at::Tensor spoiled_;  // see Seal
  uint32_t rank_;
  uint32_t num_waits_ = 0;
  // Marks waits that have ended. On the caller's stream, the writes of the marks would delay
  // compute. It is not from PyTorch's pool, because user work on a pooled stream would wait for
  // other ranks.
  c10::Device device_;
  cudaStream_t marks_;
  ExchangeTimer timer_;
  Watchdog watchdog_;
  std::vector<std::pair<c10::cuda::CUDAStream, at::Tensor>> held_;  // sent rows, by stream
};

}  // namespace distca::transport
#endif
