#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "../failures.h"
#include "../host_words.h"
#include "kernels.h"

namespace distca::transport::peer {

// A device of each rank of a group, all of which reach each other's memory.
struct Members {
  std::string group_name;  // of torch's process group
  int64_t rank;
  int64_t num_ranks;
  c10::Device device;
};

// What every rank says, [num_ranks], once all have said something. Throws DistBackendError naming
// `where` and the ranks at fault when one is gone, has failed or does not come in time.
using Meeting = std::function<std::vector<int64_t>(int64_t says, const Where& where)>;

// Memory of the ranks of a group that all of them read and write: each rank's board, and two
// buffers that calls use in turns. Symmetric: everything lies at the same place on every rank.
class PeerMemory {
 public:
  // Collective; waits for the other ranks. Once there are buffers they take `reserved_bytes`, or
  // more.
  PeerMemory(Members members, Meeting meet, int64_t reserved_bytes);

  // False before the buffers first grow, even for 0 bytes: calls need their addresses.
  bool holds(int64_t num_bytes) const { return !buffers_.empty() && num_bytes <= num_bytes_; }

  // Makes each buffer hold `num_bytes`, which are equal on all ranks, or more, and forgets what is
  // in them. Collective; this rank's device is idle. Throws GroupOutOfMemory, on every rank, naming
  // ranks and bytes where one has no memory; then the buffers stay as they are.
  void grow(int64_t num_bytes, const Where& where);

  const Board& board() const { return board_; }
  HostWords& host_words() { return host_words_; }

  // The buffer of `rank` that calls of this epoch use.
  char* buffer(int64_t rank, uint32_t epoch) const {
    return buffers_[rank] + epoch % kNumBuffers * num_bytes_;
  }

  // Of both buffers on this rank.
  int64_t total_bytes() const { return kNumBuffers * num_bytes_; }

  // Both buffers on this rank, uint8 [total_bytes()]; undefined before they first grow.
  const at::Tensor& tensor() const { return data_.tensor; }

  static constexpr int64_t kNumBuffers = 2;

 private:
  // A tensor on this rank and its addresses on all.
  struct Shared {
    at::Tensor tensor;
    std::vector<char*> addresses;
  };
  Shared share(int64_t num_bytes, const Where& where) const;
  at::Tensor allocate(int64_t num_bytes) const;
  void check_that_all_have(int64_t num_bytes, const std::string& own_problem,
                           const Where& where) const;

  Members members_;
  Meeting meet_;
  int64_t reserved_bytes_;
  Shared words_;
  HostWords host_words_;
  Board board_ = {};
  Shared data_;
  std::vector<char*> buffers_;
  int64_t num_bytes_ = 0;
};

}  // namespace distca::transport::peer
