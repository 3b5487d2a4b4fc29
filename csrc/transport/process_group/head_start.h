#pragma once

#include <c10/core/Device.h>

namespace distca::transport {

#ifdef DISTCA_WITH_CUDA
void hold_current_stream();
#endif

// Lets a communication kernel that was just launched on its own stream take its multiprocessors
// before kernels of the current stream take all of them; it would wait for those to finish.
inline void give_head_start([[maybe_unused]] const c10::Device& device) {
#ifdef DISTCA_WITH_CUDA
  if (device.is_cuda()) hold_current_stream();
#endif
}

}  // namespace distca::transport
