#include "forward_kernel.cuh"

namespace distca::attention::sm90 {

void forward_capped(const ForwardCall& call, cudaStream_t stream) {
  by_element_and_capped_widths(call, [&]<typename T, int kHeadDim, int kValueDim>() {
    launch<Capped<ShapeOf<T, kHeadDim, kValueDim>>>(call, stream);
  });
}

}  // namespace distca::attention::sm90
