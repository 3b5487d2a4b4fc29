#pragma once

#include <cstdint>

namespace distca::ops {

// major * 10000 + minor * 100 + patch, as in pyproject.toml.
constexpr int64_t kVersion = 100;

}  // namespace distca::ops
