#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

#include "checks.h"

namespace distca::ops {

// q, k and v of visiting rows.
struct VisitingInputs {
  at::Tensor q, k, v;
};

// What a rank keeps of visiting rows from the forward to the backward pass: one tensor of q's
// dtype, [elements], and its parts by round.
struct Kept {
  at::Tensor elements;
  std::vector<VisitingInputs> rounds;
};

// Throws ValueError where rows that the layout keeps do not fit into so many, unless these are
// zeros: the backward pass of this call is then an error.
Kept new_kept(const Call& call, int64_t num_queries, int64_t num_keys);

// Of what the forward pass returned. Throws ValueError where it has too few elements.
Kept kept_of(const Call& call, const at::Tensor& elements);

// Copies the rows that are kept.
void keep(const Round& round, const VisitingInputs& visiting, const VisitingInputs& kept);

// Copies them to their places among the visiting rows.
void restore(const Round& round, const VisitingInputs& kept, const VisitingInputs& visiting);

// All visiting rows: those that arrived again, and those that were kept.
VisitingInputs whole(const Round& round, const VisitingInputs& kept, const VisitingInputs& again);

// The routes of inputs for the backward pass.
inline const Route& queries_again(const Round& round) {
  return round.keeping ? round.keeping->queries : round.queries;
}
inline const Route& keys_again(const Round& round) {
  return round.keeping ? round.keeping->keys : round.keys;
}

}  // namespace distca::ops
