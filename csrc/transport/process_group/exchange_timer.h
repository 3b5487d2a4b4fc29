#pragma once

#ifdef DISTCA_WITH_CUDA
#include <cuda_runtime_api.h>

#include <deque>
#include <mutex>
#include <vector>

#include "../transport.h"

namespace distca::transport {

// Times the exchanges of a device by events. Exchanges end in the order in which they begin.
class ExchangeTimer {
 public:
  ExchangeTimer() = default;
  ExchangeTimer(const ExchangeTimer&) = delete;
  ~ExchangeTimer();

  // An exchange begins once the stream gets here, and the exchange before it has ended.
  void begin(cudaStream_t stream);
  // Ends the first exchange that has begun, on a stream that has waited for it.
  void end(const Where& where, int64_t num_bytes, cudaStream_t stream);
  // Returns the exchanges that the device has come to the end of since the last call.
  std::vector<ExchangeTime> take();

 private:
  struct Span {
    ExchangeTime time;
    cudaEvent_t begin, end;
  };

  cudaEvent_t record(cudaStream_t stream);

  std::mutex mutex_;
  std::vector<cudaEvent_t> unused_;
  std::deque<cudaEvent_t> begun_;
  std::deque<Span> spans_;
  cudaEvent_t last_end_ = nullptr;  // of the exchange before spans_
};

}  // namespace distca::transport
#endif
