#pragma once

#include "../attention.h"

// Core attention for float64, float32 and bfloat16 on the CPU: float64 computes in float64, the
// others in float32. Results do not depend on the number of threads.
namespace distca::attention::cpu {

void forward(const ForwardRows& rows, const Params& params);
void backward(const BackwardRows& rows, const Params& params);

}  // namespace distca::attention::cpu
