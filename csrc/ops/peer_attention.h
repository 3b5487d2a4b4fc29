#pragma once

#include <tuple>

#include "attention/attention.h"
#include "checks.h"
#include "keeping.h"

namespace distca::ops {

// Whether the ranks of this call write to each other's memory; alike on all of them.
bool uses_peer_memory(const Call& call, double softmax_scale);

// core_attention and its backward pass with rows that are written straight into the servers' memory
// while home tasks run, and results that come back to the homes' memory in the same way.
std::tuple<at::Tensor, at::Tensor> peer_forward(const Call& call, const Kept& kept,
                                                const attention::Params& params);

std::tuple<at::Tensor, at::Tensor, at::Tensor> peer_backward(
    const Call& call, const at::Tensor& grad_out, const at::Tensor& out, const at::Tensor& lse,
    const Kept& kept, const attention::Params& params);

// What the forward pass sends, until all that comes here is here.
void peer_exchange(const Call& call);

}  // namespace distca::ops
