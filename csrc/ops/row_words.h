#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/movement.h"
#include "transport/process_group/slots.h"

// The row indices of a layout's device tensor. They follow from a movement, and nearly all count
// upward: they travel to the device as runs, a few hundred in place of a million words.
namespace distca::ops {

// `count` words at first_word, first_word + word_step, ...: value, value + value_step, ...
struct WordRun {
  int32_t first_word;
  int32_t word_step;
  int32_t value;
  int32_t value_step;
  int32_t count;
};

// Row indices for one use. Their runs leave no word out, and count words from the list's first.
struct IndexList {
  std::vector<WordRun> runs;
  int64_t size = 0;
};

// A movement in slots: of all rows, and of those that the backward pass sends again where servers
// keep the others (nullopt: no row is kept).
struct SlotsOfRound {
  transport::Slots all;
  std::optional<transport::Slots> again;
};
SlotsOfRound slots_of_round(const Movement& movement, int64_t rank, int64_t num_ranks);

// Returns the index lists of a round, in the order in which the device tensor has them: those of
// Route (queries, keys), Reduction and, where rows are kept, of Keeping in transport/transport.h.
std::vector<IndexList> index_lists(const Movement& movement, int64_t rank,
                                   const SlotsOfRound& slots);

// The same of a part: those of Route, the rows of key results, and Route of what is sent again.
std::vector<IndexList> index_lists(const Part& part, const SlotsOfRound& slots);

// Returns the words of `packed` (int32), on its device and without a host synchronisation: runs
// that give the first num_counted, then the others as they are. Throws ValueError if `packed` does
// not have that size or, on the CPU, if a run leaves the counted words. 0 <= num_counted <=
// num_words.
at::Tensor unpack_words(const at::Tensor& packed, int64_t num_counted, int64_t num_words);

}  // namespace distca::ops
