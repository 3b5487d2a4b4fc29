#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <vector>

#include "routes.h"
#include "where.h"

namespace distca::transport {

// The tensors [home rows, ...] of one round. Results must be contiguous.
struct Cargo {
  Inputs inputs;                          // to the servers
  std::vector<at::Tensor> with_queries;   // more tensors, sent with each query row
  std::vector<at::Tensor> query_results;  // from the servers; they overwrite rows
  std::vector<at::Tensor> key_results;    // from the servers; they are added to rows
  // Visiting inputs that this rank kept. Inputs that a server kept are not sent again. If null, all
  // are sent.
  const Inputs* kept = nullptr;
};

// Rows that visit this rank, in their order. The caller writes their results to `query_results` and
// `key_results`: contiguous, uninitialised tensors with the dtypes, row shapes and order of the
// cargo's.
struct Visiting {
  Inputs inputs;
  std::vector<at::Tensor> with_queries;
  std::vector<at::Tensor> query_results;
  std::vector<at::Tensor> key_results;
};

// Moves one round's rows to their servers and their results back. Every rank of the group calls
// dispatch, arrive, combine and collect in this order. Work that a rank puts on the current stream
// between them overlaps with communication. On CUDA the current stream waits for rows, not the
// host. Throws DistBackendError if a peer is gone or makes another call. The message names the
// ranks at fault and this rank's place in the step.
class RoundTrip {
 public:
  virtual ~RoundTrip() = default;

  // Sends home rows to their servers.
  virtual void dispatch() = 0;
  // Waits for visiting rows and returns them.
  virtual Visiting arrive() = 0;
  // Sends the results of visiting rows to their homes. They must have been computed.
  virtual void combine() = 0;
  // Waits for results and writes them to the cargo's tensors.
  virtual void collect() = 0;

  // Moves rows to their servers and ends the round trip, for timing. Replaces the calls above.
  virtual void deliver() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Starts one round of a call. `routes` must outlive the round trip.
  virtual std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo,
                                           const Where& where) = 0;
};

}  // namespace distca::transport
