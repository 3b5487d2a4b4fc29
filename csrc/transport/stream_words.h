#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace distca::transport {

// Writes a word of device or registered host memory when the stream gets there, without a kernel:
// a kernel's first launch may wait for the device.

// Who sees the word knows where the stream is, but may not see what it wrote before.
void mark_on_stream(uint32_t* word, uint32_t value, cudaStream_t stream);

// Who sees the word sees what the stream wrote before.
void release_on_stream(uint64_t* word, uint64_t value, cudaStream_t stream);

}  // namespace distca::transport
