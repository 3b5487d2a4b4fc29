#pragma once

#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <utility>

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

// A stream beside the current one. Multiprocessors that become free take its kernels first, so that
// no two kernels share the device for longer than it takes one of them to end.
class Branch {
 public:
  explicit Branch(c10::DeviceIndex device);

  // What runs on the branch comes after what the current stream has been given by now.
  void fork();

  // `work` enqueues on the branch: its stream is the current one meanwhile.
  template <typename Work>
  void run(Work&& work) {
    const c10::cuda::CUDAStreamGuard guard(stream_);
    forked_.block(stream_);
    is_open_ = true;
    std::forward<Work>(work)();
  }

  // In `run`: a point that the stream beside waits for in `await_mark`.
  void mark();
  void await_mark() const;

  // The current stream waits for all that has run since `fork`. Memory that was allocated there is
  // used there again.
  void join();

 private:
  c10::cuda::CUDAStream stream_;
  Event forked_, marked_, joined_;
  bool is_open_ = false;
};

}  // namespace distca::transport::peer
