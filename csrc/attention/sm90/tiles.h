#pragma once

#include <cstdint>
#include <vector>

#include "core/mask.h"
#include "core/task.h"

// What the kernels of this folder loop over, built once per plan. Standard library only.
namespace distca::attention::sm90 {

constexpr int32_t kKeyBlockRows = 128;
constexpr int32_t kKeyPartRows = 64;             // of a block that kernels take in two parts
constexpr int32_t kTileRows[] = {64, 128, 256};  // heights of query tiles that kernels ask for

// A run is a maximal range of key rows that tasks with overlapping keys cover: one copy of a
// document's keys. A task with queries and without keys is a run of its own, of no rows. Runs are
// ordered longest tile first, in keys that a tile sees, then by key row.

// Up to tile_rows query rows of one task. Row i stands at key row `position` + i and may see key
// rows of [k_begin, k_end), as far as the mask allows. Tiles are ordered by run, then by position.
struct QueryTile {
  int32_t q_row;
  int32_t num_rows;
  int32_t position;
  int32_t k_begin;
  int32_t k_end;
  int32_t run;
  int32_t first_of_run;  // tiles of the run: [first_of_run, first_of_run + num_of_run)
  int32_t num_of_run;
};

// Up to kKeyBlockRows key rows of one run, and the smallest range [first_tile, last_tile) that
// holds every tile which sees one of them; where none does, it is empty and starts at the first
// tile of the run. Blocks are ordered by run, then by falling number of tiles, then by row.
struct KeyBlock {
  int32_t k_row;
  int32_t num_rows;  // to the end of the run; kKeyBlockRows at most
  int32_t first_tile;
  int32_t last_tile;
  int32_t run;
  int32_t first_of_run;  // blocks of the run: [first_of_run, first_of_run + num_of_run)
  int32_t num_of_run;
  int32_t unused;  // makes a KeyBlock as large as a QueryTile
};

struct TileLists {
  int32_t tile_rows = 0;
  int32_t num_runs = 0;
  std::vector<QueryTile> tiles;
  std::vector<KeyBlock> blocks;
};

// How many of each the lists have, whatever the mask; of blocks and runs, whatever the tiles too.
struct KeyCounts {
  int64_t blocks = 0;
  int64_t runs = 0;
  bool operator==(const KeyCounts&) const = default;
};
KeyCounts count_keys(const std::vector<PlacedTask>& tasks);
int64_t count_tiles(const std::vector<PlacedTask>& tasks, int32_t tile_rows);

// Every query row of every task is in one tile (a tile may see no key: its rows are written as
// such), every key row of every task in one block (no tile may see it: its gradients are written
// as zeros). Key rows of no task get no block. The order of `tasks` does not matter. Throws
// std::length_error for rows past 2^30, the reach of the kernels' copy descriptors.
TileLists make_tile_lists(const std::vector<PlacedTask>& tasks, const Mask& mask,
                          int32_t tile_rows);

}  // namespace distca::attention::sm90
