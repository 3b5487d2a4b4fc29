#include "memory.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAException.h>

#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

namespace distca::transport::peer {
namespace {

constexpr int64_t kBoardBytes = (kFirstFlag + kMaxFlags) * sizeof(uint32_t);
constexpr int64_t kGranularity = int64_t{2} << 20;

int64_t with_room(int64_t num_bytes) {
  const int64_t wanted = num_bytes + num_bytes / 4;  // plans differ from step to step
  return (wanted + kGranularity - 1) / kGranularity * kGranularity;
}

}  // namespace

PeerMemory::PeerMemory(Members members) : members_(std::move(members)) {
  TORCH_CHECK_VALUE(members_.num_ranks <= kMaxPeers, "the group has ", members_.num_ranks,
                    " ranks; peer memory serves up to ", kMaxPeers);
  words_ = share(kBoardBytes);
  board_.rank = static_cast<int>(members_.rank);
  board_.num_ranks = static_cast<int>(members_.num_ranks);
  for (int64_t rank = 0; rank < members_.num_ranks; ++rank) {
    board_.words[rank] = reinterpret_cast<uint32_t*>(words_.addresses[rank]);
  }
}

PeerMemory::Shared PeerMemory::share(int64_t num_bytes) const {
  namespace symmetric = c10d::symmetric_memory;
  at::Tensor tensor = symmetric::empty_strided_p2p({num_bytes}, {1}, at::kByte, members_.device,
                                                   members_.group_name, std::nullopt);
  // Nobody may write before this rank has cleared its own: rendezvous is a barrier.
  tensor.zero_();
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  const auto shared = symmetric::rendezvous(tensor, members_.group_name);
  std::vector<char*> addresses;
  for (void* address : shared->get_buffer_ptrs()) addresses.push_back(static_cast<char*>(address));
  return {std::move(tensor), std::move(addresses)};
}

void PeerMemory::reserve(int64_t num_bytes) {
  if (num_bytes <= num_bytes_) return;
  // The others stop using this rank's buffers when their devices are idle, which they are before
  // they meet here.
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  num_bytes_ = with_room(num_bytes);
  data_ = share(kNumBuffers * num_bytes_);
  buffers_ = data_.addresses;
}

}  // namespace distca::transport::peer
