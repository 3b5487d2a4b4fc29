#pragma once

#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <concepts>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include "layout_tensor.h"
#include "row_words.h"

// The format of a layout's two tensors. describe() visits what they hold, to write and to read it.
namespace distca::ops {

constexpr int64_t kMagic = 0x6469737463610011;  // "distca", format 17
constexpr int64_t kMinLength = 16;   // torch.compile specialises tensors of length 0 and 1
constexpr int64_t kVectorWords = 4;  // words of back ends are read by 16-byte loads
constexpr int64_t kHeaderWords = sizeof(LayoutHeader) / sizeof(int64_t);
static_assert(std::is_trivially_copyable_v<LayoutHeader> && kHeaderWords == 20);

template <typename T, typename Plain>
concept Is = std::same_as<std::remove_const_t<T>, Plain>;

// What follows the header, for Writer and for Reader.
void describe(auto& words, Is<RowPlace> auto& place) {
  words(place.home_row, place.visiting_row, place.result_row, place.num_rows);
}

void describe(auto& words, Is<Delivery> auto& delivery) {
  words(delivery.peer, delivery.is_kept);
  words.list(delivery.queries);
  words.list(delivery.keys);
}

void describe(auto& words, Is<Movement> auto& movement) {
  words(movement.max_visiting_q, movement.max_visiting_k, movement.max_returned_q,
        movement.max_returned_k);
  words.list(movement.sent);
  words.list(movement.received);
}

void describe(auto& words, Is<PlacedTask> auto& task) {
  words(task.q_row, task.num_q_rows, task.k_row, task.num_k_rows, task.q_offset);
}

void describe(auto& words, Is<int64_t> auto& word) {
  words.any(word);
}

template <typename Words>
requires Is<Words, attention::PlannedWords> || Is<Words, attention::TaskWords>
void describe(auto& words, Words& of_backend) {
  words.any(of_backend.backend);
  words.list(of_backend.host);
  words.device(of_backend.device);
}

struct Writer {
  std::vector<int64_t> host;
  std::vector<int32_t> runs;    // that give the first num_counted words of `rows`
  std::vector<int32_t> others;  // the words after them
  int64_t num_counted = 0;

  int64_t num_row_words() const { return num_counted + static_cast<int64_t>(others.size()); }

  void any(int64_t value) { host.push_back(value); }
  void operator()(const auto&... values) { (host.push_back(static_cast<int64_t>(values)), ...); }

  template <typename T>
  void list(const std::vector<T>& values) {
    host.push_back(static_cast<int64_t>(values.size()));
    for (const T& value : values) describe(*this, value);
  }

  void indices(const IndexList& list) {
    const auto first = static_cast<int32_t>(num_counted);
    for (const auto& [word, word_step, value, value_step, count] : list.runs) {
      runs.insert(runs.end(), {first + word, word_step, value, value_step, count});
    }
    num_counted += list.size;
  }

  void device(const std::vector<int32_t>& words) {
    pad_rows(round_up(num_row_words(), kVectorWords));
    host.push_back(static_cast<int64_t>(words.size()));
    others.insert(others.end(), words.begin(), words.end());
  }

  void pad_rows(int64_t num_words) {
    others.resize(others.size() + std::max<int64_t>(0, num_words - num_row_words()), 0);
  }

  at::Tensor packed_rows() const {
    at::Tensor packed = at::empty({static_cast<int64_t>(runs.size() + others.size())}, at::kInt);
    int32_t* data = packed.mutable_data_ptr<int32_t>();
    std::copy(others.begin(), others.end(), std::copy(runs.begin(), runs.end(), data));
    return packed;
  }
};

struct Reader {
  std::span<const int64_t> host;
  at::Tensor rows;
  size_t next_host = kHeaderWords;
  int64_t next_row = 0;

  void any(int64_t& value) {
    TORCH_CHECK_VALUE(next_host < host.size(), "layout: truncated at word ", next_host);
    value = host[next_host++];
  }

  template <typename T>
  void read(T& value) {
    int64_t word = 0;
    any(word);
    constexpr int64_t kLimit = std::is_same_v<T, bool> ? 1 : kMaxRows;
    TORCH_CHECK_VALUE(0 <= word && word <= kLimit, "layout: word ", next_host - 1, " is ", word,
                      "; expected 0 to ", kLimit);
    value = static_cast<T>(word);
  }
  void operator()(auto&... values) { (read(values), ...); }

  template <typename T>
  void list(std::vector<T>& values) {
    int64_t size = 0;
    read(size);
    TORCH_CHECK_VALUE(size <= static_cast<int64_t>(host.size() - next_host), "layout: a list of ",
                      size, " entries does not fit in the ", host.size() - next_host,
                      " words that are left");
    values.resize(size);
    for (T& value : values) describe(*this, value);
  }

  at::Tensor section(int64_t size) {
    TORCH_CHECK_VALUE(size <= rows.size(0) - next_row, "rows: a list of ", size,
                      " words does not fit in the ", rows.size(0) - next_row, " that are left");
    return rows.narrow(0, std::exchange(next_row, next_row + size), size);
  }

  // On a device, words are as the host wrote them.
  at::Tensor indices(const IndexList& list) {
    at::Tensor indices = section(list.size);
    if (!indices.is_cpu()) return indices;
    const int32_t* words = indices.const_data_ptr<int32_t>();
    for (const auto& [first, word_step, value, value_step, count] : list.runs) {
      for (int64_t i = 0; i < count; ++i) {
        TORCH_CHECK_VALUE(words[first + i * word_step] == value + i * value_step,
                          "rows: ", words[first + i * word_step],
                          " where the layout's movement says ", value + i * value_step,
                          "; create both with distca.plan");
      }
    }
    return indices;
  }

  void device(at::Tensor& words) {
    int64_t size = 0;
    read(size);
    next_row = round_up(next_row, kVectorWords);
    words = section(size);
    const auto address = reinterpret_cast<uintptr_t>(words.const_data_ptr<int32_t>());
    constexpr int64_t kAlignment = kVectorWords * sizeof(int32_t);
    TORCH_CHECK_VALUE(size == 0 || address % kAlignment == 0, "rows: not aligned to ", kAlignment,
                      " bytes, as the kernels read it; pass a tensor of its own, call "
                      "rows.clone()");
  }
};

}  // namespace distca::ops
