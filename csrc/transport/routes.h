#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/movement.h"
#include "rows.h"

namespace distca::transport {

// Row counts per peer, [num_ranks] each; ranks' tables must transpose.
struct RowCounts {
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
};

// One way between home rows and the visiting rows of servers in slots (process_group/slots.h), for
// queries or for keys.
struct Route {
  RowCounts counts;     // home to server
  at::Tensor home_row;  // int32, device: home row of each sent slot
  at::Tensor slot;      // int32, device: received slot of each visiting row; empty: identity
  int64_t num_visiting = 0;
};

// Inputs of visiting rows, in part kept by their servers from the forward to the backward pass.
struct Keeping {
  Route queries, keys;          // what travels again
  at::Tensor moved_q, moved_k;  // int32, device: visiting row of each that arrives again
  at::Tensor kept_q, kept_k;    // and of each that this rank keeps
};

// The ways of one round's rows, as one rank sees them: row by row for transports that write to
// their places, and in slots on the device.
struct Routes {
  Movement movement;
  std::vector<KeyGradients> key_gradients;
  Route queries;
  Route keys;
  Reduction key_sums;              // returned key slots that add up to each home row
  std::optional<Keeping> keeping;  // where any inputs that this rank sends or receives are kept
};

// q, k and v: of home rows, or of visiting rows.
struct Inputs {
  at::Tensor q;  // [rows, heads_q, head_dim]
  at::Tensor k;  // [rows, heads_kv, head_dim]
  at::Tensor v;
};

// Copies the visiting rows that are kept.
void keep(const Routes& routes, const Inputs& visiting, const Inputs& kept);

// Copies them back to their places among the visiting rows.
[[gnu::visibility("default")]] void restore(const Routes& routes, const Inputs& kept,
                                            const Inputs& visiting);

}  // namespace distca::transport
