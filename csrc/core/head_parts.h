#pragma once

#include <cstdint>

namespace distca {

// A call's rows travel in parts: `count` parts of the query heads, and `key_count` parts of the key
// heads. If key_count is smaller, consecutive parts of query heads share a part of key heads.
struct HeadParts {
  int64_t count = 1;
  int64_t key_count = 1;
};

// Divides heads into equal parts. Their count is the largest divisor of `most` that allows it.
inline HeadParts divide_heads(int64_t heads_q, int64_t heads_kv, int64_t most) {
  for (int64_t count = most; count > 1; --count) {
    if (most % count != 0) continue;
    if (heads_kv % count == 0) return {count, count};
    if (count % heads_kv == 0 && heads_q % count == 0) return {count, heads_kv};
  }
  return {};
}

}  // namespace distca
