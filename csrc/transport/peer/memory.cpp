#include "memory.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/symm_mem/SymmetricMemory.hpp>

namespace distca::transport::peer {
namespace {

namespace symmetric = c10d::symmetric_memory;

constexpr int64_t kBoardBytes = kNumWords * sizeof(uint32_t);
constexpr int64_t kGranularity = int64_t{2} << 20;
constexpr int64_t kTableBytes = 2 * kMaxPeers * sizeof(void*);

int64_t in_granules(int64_t num_bytes) {
  return (num_bytes + kGranularity - 1) / kGranularity * kGranularity;
}

// PyTorch holds back what tensors have freed: where memory is short, tries again without that.
template <typename F>
auto with_cache_emptied(F&& allocate) {
  try {
    return allocate();
  } catch (const c10::Error&) {
    c10::cuda::CUDACachingAllocator::emptyCache();
    return allocate();
  }
}

}  // namespace

PeerMemory::PeerMemory(Members members, Meeting meet, int64_t reserved_bytes)
    : members_(std::move(members)), meet_(std::move(meet)), reserved_bytes_(reserved_bytes) {
  TORCH_CHECK_VALUE(members_.num_ranks <= kMaxPeers, "the group has ", members_.num_ranks,
                    " ranks; peer memory serves up to ", kMaxPeers);
  words_ = share(kBoardBytes, {"opening of peer memory", "", -1, -1});
  board_.host = host_words_.on_device();
  board_.rank = static_cast<int>(members_.rank);
  board_.num_ranks = static_cast<int>(members_.num_ranks);
  for (int64_t rank = 0; rank < members_.num_ranks; ++rank) {
    board_.words[rank] = reinterpret_cast<uint32_t*>(words_.addresses[rank]);
  }
}

at::Tensor PeerMemory::allocate(int64_t num_bytes) const {
  // Taken and given back: rendezvous needs two small tables, when it is too late to lack memory.
  at::empty({kTableBytes}, at::TensorOptions(at::kByte).device(members_.device));
  return symmetric::empty_strided_p2p({num_bytes}, {1}, at::kByte, members_.device,
                                      members_.group_name, std::nullopt);
}

PeerMemory::Shared PeerMemory::share(int64_t num_bytes, const Where& where) const {
  at::Tensor tensor;
  std::string problem;
  try {
    tensor = with_cache_emptied([&] { return allocate(num_bytes); });
  } catch (const c10::Error& error) {
    problem = message_of(error);
  }
  // Nobody may write before this rank has cleared its own: rendezvous is a barrier.
  if (tensor.defined()) tensor.zero_();
  C10_CUDA_CHECK(cudaDeviceSynchronize());
  // Rendezvous waits for the others as long as the store does, and names nobody: only ranks that
  // have just met, all with memory, may enter it.
  check_that_all_have(num_bytes, problem, where);
  const auto shared = symmetric::rendezvous(tensor, members_.group_name);
  std::vector<char*> addresses;
  for (void* address : shared->get_buffer_ptrs()) addresses.push_back(static_cast<char*>(address));
  return {std::move(tensor), std::move(addresses)};
}

void PeerMemory::check_that_all_have(int64_t num_bytes, const std::string& own_problem,
                                     const Where& where) const {
  const std::vector<int64_t> has_memory = meet_(own_problem.empty() ? 1 : 0, where);
  std::string without;
  for (size_t rank = 0; rank < has_memory.size(); ++rank) {
    if (has_memory[rank] == 0) without += " " + std::to_string(rank);
  }
  if (without.empty()) return;
  const std::string here = own_problem.empty() ? "" : " Here: " + own_problem;
  throw GroupOutOfMemory(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
      c10::str("distca: ", describe(where), ": out of memory on rank(s)", without, ", where ",
               num_bytes, " bytes for other ranks' rows were wanted. Every rank keeps the ",
               total_bytes(), " bytes it has, and the group goes on: free memory, or lower ",
               "memory_cap_gb (and raise rounds where no plan keeps to it), or peer_memory_gb.",
               here));
}

void PeerMemory::grow(int64_t num_bytes, const Where& where) {
  const int64_t with_room = num_bytes + num_bytes / 4;  // plans differ from step to step
  const int64_t wanted =
      in_granules(std::max({with_room, reserved_bytes_ / kNumBuffers, int64_t{1}}));
  // Nobody uses this rank's old buffers: the others' devices are idle too when they meet.
  data_ = share(kNumBuffers * wanted, where);
  buffers_ = data_.addresses;
  num_bytes_ = wanted;
}

}  // namespace distca::transport::peer
