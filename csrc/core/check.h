#pragma once

#include <sstream>
#include <stdexcept>

namespace distca {

// Throws std::invalid_argument, whose message is `parts` one after the other.
template <typename... Parts>
[[noreturn, gnu::noinline]] void reject(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Rejects unless `holds`.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (!holds) reject(parts...);
}

}  // namespace distca
