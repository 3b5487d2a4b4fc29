#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/head_parts.h"
#include "core/movement.h"
#include "rows.h"
#include "where.h"

namespace distca::transport {

// Row counts per peer, [num_ranks] each. What rank a sends to b must be what b receives from a.
struct RowCounts {
  std::vector<int64_t> send;
  std::vector<int64_t> recv;
};

// The route of queries, or of keys, between home rows and servers' visiting rows by way of slots
// (process_group/slots.h).
struct Route {
  RowCounts counts;         // home to server
  at::Tensor home_row;      // int32, device: home row of each sent slot
  at::Tensor visiting_row;  // int32, device: of each received slot; empty: slot i holds row i
  int64_t num_visiting = 0;
};

// Routes of the backward pass if servers keep some inputs of the forward pass.
struct Keeping {
  Route queries, keys;        // of the inputs that are sent again
  at::Tensor kept_q, kept_k;  // int32, device: visiting rows that this rank keeps; of a part: null
};

struct NodeRoutes;

// The routes of one round's rows, as one rank sees them: `movement` and `key_gradients` for
// transports that write rows to their places, the other fields for transports that use slots.
// A part of them (see NodeRoutes) has places for all visiting rows, but moves only some of them.
struct Routes {
  Movement movement;
  std::vector<KeyGradients> key_gradients;
  Route queries;
  Route keys;
  Reduction key_sums;              // the returned key slots whose sum goes to each home row
  std::optional<Keeping> keeping;  // set if inputs that this rank sends or receives are kept
  // Whether results of keys are added to rows. In a part they are not: each overwrites a row of its
  // own, key_sums.row, among the results of all sent keys.
  bool sums_keys = true;
  std::shared_ptr<const NodeRoutes> by_node;  // set if another transport serves this node
};

// Both parts of a round's routes.
struct NodeRoutes {
  Routes inside;   // to and from ranks of this node, numbered from its first rank
  Routes between;  // to and from ranks of other nodes
};

// q, k and v of home rows, or of visiting rows. k and v are undefined if their heads travel with an
// earlier part of the query heads.
struct Inputs {
  at::Tensor q;  // [rows, heads_q, head_dim]
  at::Tensor k;  // [rows, heads_kv, head_dim]
  at::Tensor v;  // [rows, heads_kv, head_dim_v]
};

// Copies visiting rows that this rank keeps from `visiting` to `kept`.
void keep(const Routes& routes, const Inputs& visiting, const Inputs& kept);

// Copies rows from `kept` to their places in `visiting`.
[[gnu::visibility("default")]] void restore(const Routes& routes, const Inputs& kept,
                                            const Inputs& visiting);

// The tensors [home rows, heads, ...] of one round. Results must be contiguous.
struct Cargo {
  Inputs inputs;                          // to the servers
  std::vector<at::Tensor> with_queries;   // more tensors, sent with each query row
  std::vector<at::Tensor> query_results;  // from the servers; they overwrite rows
  std::vector<at::Tensor> key_results;    // from the servers; see Routes::sums_keys
  // Visiting inputs that this rank kept. Inputs that a server kept are not sent again. If null, all
  // are sent.
  const Inputs* kept = nullptr;
};

// Rows that visit this rank, in their order, with the heads of one part. The caller writes their
// results to `query_results` and `key_results`: contiguous, uninitialised tensors with the dtypes,
// row shapes and order of the cargo's. `key_results` is empty if the part returns no key gradients.
struct Visiting {
  Inputs inputs;
  std::vector<at::Tensor> with_queries;
  std::vector<at::Tensor> query_results;
  std::vector<at::Tensor> key_results;
};

// Moves one round's rows to their servers and their results back. Every rank of the group calls
// dispatch, then arrive and combine for each part of the heads, then collect. Work that a rank puts
// on the current stream between them overlaps with communication. On CUDA the current stream waits
// for rows, not the host. Throws DistBackendError if a peer is gone or makes another call. The
// message names the ranks at fault and this rank's place in the step.
class RoundTrip {
 public:
  virtual ~RoundTrip() = default;

  // Sends this rank's rows to their servers. A transport may send the parts one after another.
  virtual void dispatch() = 0;
  // Waits for the visiting rows of the next part and returns them.
  virtual Visiting arrive() = 0;
  // Does the same, but writes the rows to `room`, which has places for all visiting rows, and reads
  // results from there. For a transport that moves only some of the rows: see NodeRoutes.
  virtual void arrive_in(const Visiting& /*room*/) {
    TORCH_INTERNAL_ASSERT(false, "this transport has its own memory for visiting rows");
  }
  // Sends the results of the latest arrive() home. The caller must have computed them. A transport
  // may wait for the last part and then send all results.
  virtual void combine() = 0;
  // Waits for results and writes them to the cargo's tensors.
  virtual void collect() = 0;

  // Moves rows to their servers and ends the round trip, for timing. Replaces the calls above.
  virtual void deliver() = 0;
};

// An exchange of rows by a process group on a device.
struct ExchangeTime {
  bool is_backward;     // pass
  bool is_combine;      // or dispatch
  int64_t num_bytes;    // that this rank sends or receives, whichever are more
  int64_t nanoseconds;  // from the end of the work before it, waits for slower ranks included
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Starts one round of a call. If takes_parts() is false, `parts` has one part. `routes` and what
  // `cargo` points to must outlive the round trip.
  virtual std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo,
                                           const HeadParts& parts, const Where& where) = 0;

  // Whether rows may travel in several parts. Visiting tasks of one part then run while rows of the
  // next part arrive and results of the previous part leave.
  virtual bool takes_parts() const { return false; }

  // Whether kernels that move rows need multiprocessors while tasks run.
  virtual bool shares_device() const { return false; }

  // Returns the timed exchanges that have ended since the last call. For any thread.
  virtual std::vector<ExchangeTime> take_times() { return {}; }

  // Returns the buffers in which other ranks read and write rows, uint8 [bytes]; undefined if none.
  virtual at::Tensor shared_memory() const { return {}; }
};

}  // namespace distca::transport
