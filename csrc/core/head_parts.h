#pragma once

#include <cstdint>

namespace distca {

// Parts in which the heads of a call's rows travel: `count` of query heads, and `key_count` of key
// heads. If there are fewer of these, consecutive parts of query heads share one.
struct HeadParts {
  int64_t count = 1;
  int64_t key_count = 1;
};

// Returns the largest number of equal parts that divides `most`.
inline HeadParts divide_heads(int64_t heads_q, int64_t heads_kv, int64_t most) {
  for (int64_t count = most; count > 1; --count) {
    if (most % count != 0) continue;
    if (heads_kv % count == 0) return {count, count};
    if (count % heads_kv == 0 && heads_q % count == 0) return {count, heads_kv};
  }
  return {};
}

}  // namespace distca
