#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace distca::transport::peer {

// Lets all ranks of a process group access `tensor`, which must be symmetric memory of equal size
// on every rank. Returns, for each rank, the address at which this rank can access its memory.
// Collective. Waits for the other ranks until the timeout of the group's store.
std::vector<char*> rendezvous(const at::Tensor& tensor, const std::string& group_name);

}  // namespace distca::transport::peer
