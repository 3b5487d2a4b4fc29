#pragma once

#include <cstdint>
#include <vector>

#include "core/movement.h"

namespace distca::transport {

// A movement in the form that all_to_all exchanges: rows travel in slots. Sent slots are ordered by
// peer, then in the order of the peer's visiting rows. Received slots are ordered by peer, then in
// the order of this rank's visiting rows. So what one rank sends is what its peer receives.
struct Slots {
  std::vector<int64_t> send_q_rows, recv_q_rows;  // [num_ranks] rows to and from each peer
  std::vector<int64_t> send_k_rows, recv_k_rows;  // [num_ranks]

  std::vector<Run> send_q_runs, send_k_runs;  // home rows of the sent slots, in order

  // Visiting rows of the received slots, in order; empty if slot i holds visiting row i.
  std::vector<Run> recv_q_runs, recv_k_runs;
};

enum class Moving { kAll, kNotKept };

Slots slots_of(const Movement& movement, int64_t rank, int64_t num_ranks, Moving moving);

}  // namespace distca::transport
