#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <vector>

#include "../watchdog.h"
#include "kernels.h"

namespace distca::transport::peer {

// Kernels that wait for words of this rank's board. Poison releases them: it stands for every
// epoch, and stays.
class BoardWatch : public Watched {
 public:
  BoardWatch(const Board& board, c10::Device device);
  BoardWatch(const BoardWatch&) = delete;
  ~BoardWatch() override;

  void begin(uint32_t epoch, const Where& where);

  State look() override;
  Where place() override;
  bool release() override;

 private:
  struct Call {
    uint32_t epoch;
    Where where;
  };

  bool read_words();
  uint32_t word(Word word) const { return words_[word_index(word, board_.rank)]; }

  Board board_;
  c10::Device device_;
  cudaStream_t stream_ = nullptr;
  std::vector<uint32_t> words_;  // as last read, the first of the board

  std::mutex mutex_;
  std::deque<Call> calls_;  // the latest
};

}  // namespace distca::transport::peer
