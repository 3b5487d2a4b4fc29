#include "forward_kernel.cuh"

namespace distca::attention::sm90 {

void forward(const ForwardCall& call, cudaStream_t stream) {
  if (call.tiles.num_tiles == 0) return;
  if (call.softcap != 0.f) return forward_capped(call, stream);
  by_element_and_widths(call, [&]<typename T, int kHeadDim, int kValueDim>() {
    launch<ShapeOf<T, kHeadDim, kValueDim>>(call, stream);
  });
}

}  // namespace distca::attention::sm90
