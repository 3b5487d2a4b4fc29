#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace distca::transport::peer {

// A device of each rank of a group, all of which reach each other's memory.
struct Members {
  std::string group_name;  // of torch's process group
  int64_t rank;
  int64_t num_ranks;
  c10::Device device;
};

// Memory of the ranks of a group that all of them read and write: each rank's board, and two
// buffers that calls use in turns. Symmetric: everything lies at the same place on every rank.
class PeerMemory {
 public:
  // Collective; waits for the other ranks.
  explicit PeerMemory(Members members);

  // Makes each buffer hold `num_bytes`, which are equal on all ranks. Collective where that is more
  // than before: it waits for the device and the other ranks.
  void reserve(int64_t num_bytes);

  const Board& board() const { return board_; }

  // The buffer of `rank` that calls of this epoch use.
  char* buffer(int64_t rank, uint32_t epoch) const {
    return buffers_[rank] + epoch % kNumBuffers * num_bytes_;
  }

  // Of both buffers on this rank.
  int64_t total_bytes() const { return kNumBuffers * num_bytes_; }

  static constexpr int64_t kNumBuffers = 2;

 private:
  // A tensor on this rank and its addresses on all.
  struct Shared {
    at::Tensor tensor;
    std::vector<char*> addresses;
  };
  Shared share(int64_t num_bytes) const;

  Members members_;
  Shared words_;
  Board board_ = {};
  Shared data_;
  std::vector<char*> buffers_;
  int64_t num_bytes_ = 0;
};

}  // namespace distca::transport::peer
