#include "row_words.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/repeat_interleave.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <optional>
#include <utility>

namespace distca::ops {
namespace {

constexpr int64_t kRunWords = 5;
static_assert(sizeof(WordRun) == kRunWords * sizeof(int32_t));

void unpack_on_cpu(const at::Tensor& packed, int64_t num_runs, int64_t num_counted,
                   const at::Tensor& words) {
  const auto* runs = reinterpret_cast<const WordRun*>(packed.const_data_ptr<int32_t>());
  int32_t* to = words.mutable_data_ptr<int32_t>();
  int64_t num_written = 0;
  for (int64_t i = 0; i < num_runs; ++i) {
    const WordRun& run = runs[i];
    const int64_t last = run.first_word + int64_t{run.word_step} * (int64_t{run.count} - 1);
    num_written += run.count;
    TORCH_CHECK_VALUE(run.count >= 1 && run.first_word >= 0 && run.word_step >= 1 &&
                          last < num_counted && num_written <= num_counted,
                      "packed_rows: run ", i, " of ", run.count, " words from ", run.first_word,
                      " by ", run.word_step, " leaves the ", num_counted,
                      " words that are counted; make it with distca.plan");
    // Unsigned, so that crafted steps wrap around.
    uint32_t value = static_cast<uint32_t>(run.value);
    if (run.word_step == 1 && run.value_step == 1) {
      for (int32_t j = 0; j < run.count; ++j) {
        to[run.first_word + j] = static_cast<int32_t>(value + static_cast<uint32_t>(j));
      }
      continue;
    }
    for (int64_t at = run.first_word; at <= last; at += run.word_step) {
      to[at] = static_cast<int32_t>(value);
      value += static_cast<uint32_t>(run.value_step);
    }
  }
  TORCH_CHECK_VALUE(num_written == num_counted, "packed_rows: its runs give ", num_written,
                    " words, not ", num_counted, "; make it with distca.plan");
}

void unpack_on_device(const at::Tensor& packed, int64_t num_runs, int64_t num_counted,
                      const at::Tensor& words) {
  const at::Tensor runs =
      packed.narrow(0, 0, kRunWords * num_runs).view({num_runs, kRunWords}).to(at::kLong);
  const at::Tensor lengths = runs.select(1, 4);
  // The run of each counted word. A plain integer would ask for each run that many times.
  const at::Tensor run = at::repeat_interleave(lengths, std::optional<int64_t>(num_counted));
  const at::Tensor before = lengths.cumsum(0) - lengths;
  const at::Tensor in_run = at::arange(num_counted, run.options()) - before.index_select(0, run);
  const auto column = [&](int64_t i) { return runs.select(1, i).index_select(0, run); };
  const at::Tensor place = column(0) + in_run * column(1);
  words.index_copy_(0, place, (column(2) + in_run * column(3)).to(at::kInt));
}

IndexList counting(const std::vector<Run>& runs) {
  IndexList list;
  for (const Run& run : runs) {
    list.runs.push_back({static_cast<int32_t>(list.size), 1, static_cast<int32_t>(run.first), 1,
                         static_cast<int32_t>(run.length)});
    list.size += run.length;
  }
  return list;
}

void append_reduction(const std::vector<Run>& sent_keys, std::vector<IndexList>& lists) {
  IndexList row, begin{{{0, 1, 0, 0, 1}}, 1}, slot;
  for (const SharedRows& shared : shared_rows(sent_keys)) {
    const auto length = static_cast<int32_t>(shared.length);
    const auto per_row = static_cast<int32_t>(shared.slots.size());
    const auto first_row = static_cast<int32_t>(row.size), first = static_cast<int32_t>(slot.size);
    row.runs.push_back({first_row, 1, static_cast<int32_t>(shared.first), 1, length});
    begin.runs.push_back({first_row + 1, 1, first + per_row, per_row, length});
    for (int32_t i = 0; i < per_row; ++i) {
      slot.runs.push_back({first + i, per_row, shared.slots[i], 1, length});
    }
    row.size += length;
    begin.size += length;
    slot.size += int64_t{length} * per_row;
  }
  lists.insert(lists.end(), {std::move(row), std::move(begin), std::move(slot)});
}

void append_slots(const transport::Slots& slots, std::vector<IndexList>& lists) {
  for (const auto* runs :
       {&slots.send_q_runs, &slots.recv_q_runs, &slots.send_k_runs, &slots.recv_k_runs}) {
    lists.push_back(counting(*runs));
  }
}

}  // namespace

SlotsOfRound slots_of_round(const Movement& movement, int64_t rank, int64_t num_ranks) {
  using transport::Moving;
  SlotsOfRound slots{transport::slots_of(movement, rank, num_ranks, Moving::kAll), {}};
  if (keeps_any(movement)) {
    slots.again = transport::slots_of(movement, rank, num_ranks, Moving::kNotKept);
  }
  return slots;
}

std::vector<IndexList> index_lists(const Movement& movement, int64_t rank,
                                   const SlotsOfRound& slots) {
  std::vector<IndexList> lists;
  append_slots(slots.all, lists);
  append_reduction(slots.all.send_k_runs, lists);
  if (!slots.again) return lists;
  append_slots(*slots.again, lists);
  const VisitingRuns kept = kept_runs(movement, rank);
  lists.push_back(counting(kept.queries));
  lists.push_back(counting(kept.keys));
  return lists;
}

std::vector<IndexList> index_lists(const Part& part, const SlotsOfRound& slots) {
  std::vector<IndexList> lists;
  append_slots(slots.all, lists);
  std::vector<Run> rows;
  for (const KeyGradients& result : part.key_results) {
    append_run(result.home_row, result.num_rows, rows);
  }
  lists.push_back(counting(rows));
  if (slots.again) append_slots(*slots.again, lists);
  return lists;
}

at::Tensor unpack_words(const at::Tensor& packed, int64_t num_counted, int64_t num_words) {
  TORCH_CHECK_VALUE(packed.scalar_type() == at::kInt && packed.dim() == 1 && packed.is_contiguous(),
                    "packed_rows: expected a contiguous one-dimensional int32 tensor, got ",
                    packed.toString());
  const int64_t num_others = num_words - num_counted;
  const int64_t num_run_words = packed.size(0) - num_others;
  TORCH_CHECK_VALUE(0 <= num_run_words && num_run_words % kRunWords == 0,
                    "packed_rows: ", packed.size(0), " words are not runs and ", num_others,
                    " others; make it with distca.plan");
  at::Tensor words = at::empty({num_words}, packed.options());
  const int64_t num_runs = num_run_words / kRunWords;
  if (packed.is_cpu()) {
    unpack_on_cpu(packed, num_runs, num_counted, words);
  } else if (num_counted > 0) {
    unpack_on_device(packed, num_runs, num_counted, words);
  }
  words.narrow(0, num_counted, num_others).copy_(packed.narrow(0, num_run_words, num_others));
  return words;
}

}  // namespace distca::ops
