#include "streams.h"

#include <c10/cuda/CUDAException.h>

namespace distca::transport::peer {

Event::Event() {
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
}

Event::~Event() {
  C10_CUDA_CHECK_WARN(cudaEventDestroy(event_));
}

void Event::record(cudaStream_t stream) {
  C10_CUDA_CHECK(cudaEventRecord(event_, stream));
}

void Event::block(cudaStream_t stream) const {
  C10_CUDA_CHECK(cudaStreamWaitEvent(stream, event_));
}

Branch::Branch(c10::DeviceIndex device) : stream_(c10::cuda::getStreamFromPool(true, device)) {}

void Branch::fork() {
  forked_.record(c10::cuda::getCurrentCUDAStream());
}

void Branch::mark() {
  marked_.record(stream_);
}

void Branch::await_mark() const {
  marked_.block(c10::cuda::getCurrentCUDAStream());
}

void Branch::join() {
  if (!std::exchange(is_open_, false)) return;
  joined_.record(stream_);
  joined_.block(c10::cuda::getCurrentCUDAStream());
}

}  // namespace distca::transport::peer
