#pragma once

#include <cstdint>

namespace distca::ops {

// Returns a number that identifies the backward pass that runs on this thread, or on the thread
// whose state this thread has taken over (see ThreadState). -1 outside of a backward pass.
int64_t backward_pass();

}  // namespace distca::ops
