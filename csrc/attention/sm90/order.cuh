#pragma once

#include <cstdint>

namespace distca::attention::sm90 {

// A run's items, num_heads of them for each of its blocks or tiles, are ordered by groups of heads,
// in a group by block, heads fastest.
struct HeadGroup {
  int32_t first_head;
  int32_t num_heads;
  int32_t in_group;  // index among the group's items
};

// Items of a group that give every multiprocessor several, so that the last group ends evenly.
constexpr int32_t kItemsOfGroup = 1024;

// `index` counts the run's items. Groups are as small as `items_at_least` allows, so that items in
// work share what they read.
__device__ __forceinline__ HeadGroup head_group(int32_t index, int32_t num_blocks,
                                                int32_t num_heads, int32_t heads_at_least,
                                                int32_t items_at_least = kItemsOfGroup) {
  const int32_t wanted = (items_at_least + num_blocks - 1) / num_blocks;
  const int32_t rounded = (wanted + heads_at_least - 1) / heads_at_least * heads_at_least;
  const int32_t in_full = min(rounded, num_heads);
  const int32_t group = index / (in_full * num_blocks);
  const int32_t first_head = group * in_full;
  return {first_head, min(in_full, num_heads - first_head), index - first_head * num_blocks};
}

}  // namespace distca::attention::sm90
