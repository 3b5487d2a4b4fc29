#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/movement.h"
#include "rows.h"

namespace distca::transport {

// Row counts per peer, [num_ranks] each. What rank a sends to b must be what b receives from a.
struct RowCounts {
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
};

// The route of queries, or of keys, between home rows and servers' visiting rows by way of slots
// (process_group/slots.h).
struct Route {
  RowCounts counts;     // home to server
  at::Tensor home_row;  // int32, device: home row of each sent slot
  at::Tensor slot;      // int32, device: received slot of each visiting row; empty: identity
  int64_t num_visiting = 0;
};

// Routes of the backward pass if servers keep some inputs of the forward pass.
struct Keeping {
  Route queries, keys;          // of the inputs that are sent again
  at::Tensor moved_q, moved_k;  // int32, device: visiting rows that arrive again
  at::Tensor kept_q, kept_k;    // int32, device: visiting rows that this rank keeps
};

// The routes of one round's rows, as one rank sees them: `movement` and `key_gradients` for
// transports that write rows to their places, the other fields for transports that use slots.
struct Routes {
  Movement movement;
  std::vector<KeyGradients> key_gradients;
  Route queries;
  Route keys;
  Reduction key_sums;              // the returned key slots whose sum goes to each home row
  std::optional<Keeping> keeping;  // set if inputs that this rank sends or receives are kept
};

// q, k and v of home rows, or of visiting rows.
struct Inputs {
  at::Tensor q;  // [rows, heads_q, head_dim]
  at::Tensor k;  // [rows, heads_kv, head_dim]
  at::Tensor v;
};

// Copies visiting rows that this rank keeps from `visiting` to `kept`.
void keep(const Routes& routes, const Inputs& visiting, const Inputs& kept);

// Copies rows from `kept` to their places in `visiting`.
[[gnu::visibility("default")]] void restore(const Routes& routes, const Inputs& kept,
                                            const Inputs& visiting);

}  // namespace distca::transport
