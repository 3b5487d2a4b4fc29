#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <vector>

namespace distca::ops {

// `count` words at first_word, first_word + word_step, ...: value, value + value_step, ...
struct WordRun {
  int32_t first_word;
  int32_t word_step;
  int32_t value;
  int32_t value_step;
  int32_t count;
};

// The words of a layout's device tensor. Most are row indices that count upward: they travel to
// the device as runs, a few hundred in place of a million words.
class RowWords {
 public:
  int64_t size() const { return total_; }
  int64_t num_counted() const { return counted_; }  // words that runs give
  // Room for `count` words that runs will give; where it begins.
  int64_t reserve(int64_t count);
  // The words of one run after another must be reserved, and none left out.
  void add(const WordRun& run);
  void append_counted(int64_t value, int64_t count) {
    const auto first_word = static_cast<int32_t>(reserve(count));
    add({first_word, 1, static_cast<int32_t>(value), 1, static_cast<int32_t>(count)});
  }
  // As they are. Nothing counted may follow.
  void append(std::span<const int32_t> words);

  at::Tensor packed() const;  // int32, CPU

 private:
  int64_t total_ = 0;
  int64_t counted_ = 0;
  std::vector<int32_t> runs_;
  std::vector<int32_t> literals_;
};

// Writes out what RowWords packed, num_words of which runs give the first num_counted, on the
// device of `packed` and without a host synchronisation. Throws ValueError when it does not have
// the size of such, or, on the CPU, when a run leaves the counted words. 0 <= num_counted <=
// num_words.
at::Tensor unpack_words(const at::Tensor& packed, int64_t num_counted, int64_t num_words);

}  // namespace distca::ops
