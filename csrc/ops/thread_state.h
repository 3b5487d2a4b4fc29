#pragma once

#include <cstdint>

namespace distca::ops {

// Returns a number for the backward pass that runs on this thread, or for which this thread runs:
// see ThreadState. -1 outside of one.
int64_t backward_pass();

}  // namespace distca::ops
