#pragma once

#include <c10/cuda/CUDAStream.h>

#include <cstdint>

namespace distca::transport {

// Writes a word of device or registered host memory when the stream gets there, after what it wrote
// before. Without a kernel: a kernel's first launch may wait for the device.
void write_on_stream(uint32_t* word, uint32_t value, cudaStream_t stream);
void write_on_stream(uint64_t* word, uint64_t value, cudaStream_t stream);

// A stream that no other code uses.
class OwnStream {
 public:
  explicit OwnStream(c10::Device device);
  OwnStream(const OwnStream&) = delete;
  ~OwnStream();
  c10::cuda::CUDAStream stream() const;

 private:
  c10::Device device_;
  cudaStream_t stream_ = nullptr;
};

}  // namespace distca::transport
