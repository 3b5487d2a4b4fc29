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
  std::vector<at::Tensor> with_queries;   // what else goes with each query row
  std::vector<at::Tensor> query_results;  // from the servers: rows are written
  std::vector<at::Tensor> key_results;    // rows are added to what is there
  // Visiting inputs that this rank kept. Those that any server kept do not travel again. Null: all
  // travel.
  const Inputs* kept = nullptr;
};

// Rows that visit this rank, in their order. The results of these rows, contiguous, go where
// `query_results` and `key_results` say: tensors of the cargo's dtypes and row shapes, in its
// order, uninitialised.
struct Visiting {
  Inputs inputs;
  std::vector<at::Tensor> with_queries;
  std::vector<at::Tensor> query_results;
  std::vector<at::Tensor> key_results;
};

// One round's rows, to their servers and back. Every rank of the group calls these in this order,
// and may compute between them: work that it puts on the current stream runs beside the rows. On
// CUDA the current stream waits for rows, not the host. Throws DistBackendError naming the ranks at
// fault and where the rank is in the step if a peer is gone or makes another call.
class RoundTrip {
 public:
  virtual ~RoundTrip() = default;

  // Home rows leave for their servers.
  virtual void dispatch() = 0;
  // Waits for visiting rows.
  virtual Visiting arrive() = 0;
  // The results of visiting rows, which have been computed, leave for their homes.
  virtual void combine() = 0;
  // Waits for results and puts them into the cargo's tensors.
  virtual void collect() = 0;

  // Instead of all that: brings the rows to their servers and ends there, to be timed.
  virtual void deliver() = 0;
};

class Transport {
 public:
  virtual ~Transport() = default;

  // Starts a round of a call. `routes` must outlive the round trip.
  virtual std::unique_ptr<RoundTrip> begin(const Routes& routes, Cargo cargo,
                                           const Where& where) = 0;
};

}  // namespace distca::transport
