#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checks.h"

namespace distca::ops {

// What a rank keeps of visiting rows from the forward to the backward pass: one tensor of q's
// dtype, [elements], and its parts by round.
struct Kept {
  at::Tensor elements;
  std::vector<transport::Inputs> rounds;
};

// Throws ValueError where rows that the layout keeps do not fit into so many, unless these are
// zeros: the backward pass of this call is then an error.
Kept new_kept(const Call& call, int64_t num_queries, int64_t num_keys);

// Of what the forward pass returned. Throws ValueError where it has too few elements.
Kept kept_of(const Call& call, const at::Tensor& elements);

}  // namespace distca::ops
