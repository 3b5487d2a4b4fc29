#include "backward_kernel.cuh"

namespace distca::attention::sm90 {

void backward_capped(const BackwardCall& call, cudaStream_t stream) {
  by_element_and_capped_widths(call, [&]<typename T, int kHeadDim, int kValueDim>() {
    if (call.deterministic) {
      launch<Capped<BackwardShape<T, kHeadDim, kValueDim, true>>>(call, stream);
    } else {
      launch<Capped<BackwardShape<T, kHeadDim, kValueDim, false>>>(call, stream);
    }
  });
}

}  // namespace distca::attention::sm90
