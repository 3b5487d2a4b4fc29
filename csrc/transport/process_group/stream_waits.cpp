#ifdef DISTCA_WITH_CUDA
#include "stream_waits.h"

#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

namespace distca::transport {
namespace {

cudaStream_t new_stream(c10::Device device) {
  const c10::cuda::CUDAGuard guard(device);
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}

}  // namespace

StreamWaits::StreamWaits(const Opening& opening, c10::Device device)
    : spoiled_(at::zeros({1}, at::TensorOptions(device).dtype(at::kInt))),
      rank_(static_cast<uint32_t>(opening.failures->rank())),
      device_(device),
      marks_(new_stream(device)),
      timer_(marks_),
      watchdog_(
          words_, [group = opening.group, device] { group->getBackend(device.type())->abort(); },
          opening.failures, opening.timeout_s) {
  const c10::cuda::CUDAGuard guard(device);
  c10::cuda::getCurrentCUDAStream().synchronize();  // other streams read `spoiled_`, too
}

StreamWaits::~StreamWaits() {
  release_later();
  C10_CUDA_CHECK_WARN(cudaStreamDestroy(marks_));
}

void StreamWaits::begin(const Where& where) {
  timer_.begin(where, c10::cuda::getCurrentCUDAStream(device_.index()));
}

void StreamWaits::add(const Pending& pending, int64_t num_bytes) {
  const uint32_t number = ++num_waits_;
  watchdog_.note(number, pending.wait, pending.wait.where.phase);
  words_.write(HostWord::kStarted, number);
  const c10::cuda::CUDAStreamGuard guard(marks());
  for (const auto& work : pending.works) work->wait();
  timer_.end(pending.wait.where, num_bytes);
  write_on_stream(words_.on_device() + static_cast<int>(HostWord::kFinished), number, marks_);
}

void StreamWaits::hold(const at::Tensor& sent) {
  held_.emplace_back(c10::cuda::getCurrentCUDAStream(device_.index()), sent);
}

void StreamWaits::release() {
  const c10::cuda::CUDAStream current = c10::cuda::getCurrentCUDAStream(device_.index());
  std::erase_if(held_, [&](const auto& held) { return held.first == current; });
  release_later();
}

void StreamWaits::release_later() {
  for (const auto& [stream, sent] : held_) sent.record_stream(marks());
  held_.clear();
}

Seal StreamWaits::seal(const Where& where) {
  return {tag_of(where), rank_, words_.on_device(), static_cast<uint32_t*>(spoiled_.data_ptr())};
}

}  // namespace distca::transport
#endif
