#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <vector>

namespace distca::transport::peer {

// Lets all ranks of a process group reach the memory of `tensor`, which is as large on all of them
// and was allocated as symmetric memory. Returns its address on each rank, as seen by this one.
// Collective, and waits for the other ranks as long as the group's store does.
std::vector<char*> rendezvous(const at::Tensor& tensor, const std::string& group_name);

}  // namespace distca::transport::peer
