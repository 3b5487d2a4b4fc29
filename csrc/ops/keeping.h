#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checks.h"

namespace distca::ops {

// The inputs of visiting rows that a rank keeps from the forward to the backward pass: one tensor
// [elements] of q's dtype, and its parts by round.
struct Kept {
  at::Tensor elements;
  std::vector<transport::Inputs> rounds;
};

// Returns room for the inputs of so many visiting rows. Throws ValueError if the layout keeps more.
// If both numbers are 0, nothing is kept, and the backward pass raises an error if the layout keeps
// rows.
Kept new_kept(const Call& call, int64_t num_queries, int64_t num_keys);

// Peaks over all groups of this process since the previous take_kept_peak().
struct KeptPeak {
  int64_t num_bytes = 0;  // of kept inputs
  int64_t num_calls = 0;  // of core_attention whose backward pass is still to come
};
KeptPeak take_kept_peak();

// Splits the elements that the forward pass returned. Throws ValueError if there are too few.
Kept kept_of(const Call& call, const at::Tensor& elements);

}  // namespace distca::ops
