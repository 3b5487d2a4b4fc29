#pragma once

#ifdef DISTCA_WITH_CUDA
#include <cuda_runtime_api.h>

#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "../transport.h"

namespace distca::transport {

// Times some of a device's exchanges by events. Exchanges end in the order in which they begin.
class ExchangeTimer {
 public:
  // `ends` is the stream that waits for exchanges to end.
  explicit ExchangeTimer(cudaStream_t ends) : ends_(ends) {}
  ExchangeTimer(const ExchangeTimer&) = delete;
  ~ExchangeTimer();

  // Notes that an exchange begins once the stream gets here and the exchange before it has ended.
  void begin(const Where& where, cudaStream_t stream);
  // Notes the end of the oldest exchange that is under way. Call it once `ends` waits for it.
  void end(const Where& where, int64_t num_bytes);
  // Returns the exchanges that have ended on the device since the last call.
  std::vector<ExchangeTime> take();

 private:
  struct Span {
    ExchangeTime time;
    cudaEvent_t begin, end;
    cudaEvent_t previous_end;  // of the exchange before this one
  };

  cudaEvent_t record(cudaStream_t stream);
  void forget(const Span& span);

  cudaStream_t ends_;
  std::mutex mutex_;
  std::vector<cudaEvent_t> unused_;
  std::deque<std::optional<Span>> begun_;  // nullopt for exchanges that are not timed
  std::deque<Span> ended_;
};

}  // namespace distca::transport
#endif
