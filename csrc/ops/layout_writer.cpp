#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "layout_tensor.h"
#include "layout_words.h"
#include "planner/layout/shared_rows.h"
#include "row_words.h"

namespace distca::ops {
namespace {

at::Tensor padded_tensor(const std::vector<int64_t>& values) {
  const int64_t length = std::max<int64_t>(static_cast<int64_t>(values.size()), kMinLength);
  at::Tensor tensor = at::empty({length}, at::kLong);
  int64_t* data = tensor.mutable_data_ptr<int64_t>();
  std::copy(values.begin(), values.end(), data);
  std::fill(data + values.size(), data + length, int64_t{0});
  return tensor;
}

int64_t length_of(const std::vector<Run>& runs) {
  return std::accumulate(runs.begin(), runs.end(), int64_t{0},
                         [](int64_t sum, Run run) { return sum + run.length; });
}

// Appends sections, each preceded by its length on the host side.
struct Writer {
  std::vector<int64_t> host;
  RowWords device;

  void counts(const std::vector<int64_t>& values) {
    host.insert(host.end(), values.begin(), values.end());
  }
  void section(const std::vector<int32_t>& words) {
    host.push_back(static_cast<int64_t>(words.size()));
    device.append(words);
  }
  void section(const std::vector<Run>& runs) {
    host.push_back(length_of(runs));
    for (const Run& run : runs) device.append_counted(run.first, run.length);
  }
  void movement(const planner::Movement& movement);
  void routes(const planner::Layout& layout);
  void tasks(const std::vector<PlacedTask>& tasks, const Mask& mask,
             const std::string& device_type);
};

void Writer::tasks(const std::vector<PlacedTask>& tasks, const Mask& mask,
                   const std::string& device_type) {
  host.push_back(static_cast<int64_t>(tasks.size()));
  for (const PlacedTask& t : tasks) {
    counts({t.q_row, t.num_q_rows, t.k_row, t.num_k_rows, t.q_offset});
  }
  const auto all_words = attention::plan_words(tasks, mask, device_type);
  host.push_back(static_cast<int64_t>(all_words.size()));
  for (const attention::PlannedWords& words : all_words) {
    counts({words.backend, static_cast<int64_t>(words.host.size())});
    counts(words.host);
    device.append(std::vector<int32_t>(round_up(device.size(), kVectorWords) - device.size(), 0));
    section(words.device);
  }
}

// Home rows whose sent keys come back as gradients, each with its slots in order: rows, where the
// slots of each begin, slots.
void write_reduction(const std::vector<Run>& runs, Writer& writer) {
  const std::vector<planner::SharedRows> shared = planner::shared_rows(runs);
  int64_t num_rows = 0, num_slots = 0;
  for (const planner::SharedRows& rows : shared) {
    num_rows += rows.length;
    num_slots += rows.length * static_cast<int64_t>(rows.slots.size());
  }
  RowWords& device = writer.device;
  writer.host.push_back(num_rows);
  for (const planner::SharedRows& rows : shared) device.append_counted(rows.first, rows.length);

  writer.host.push_back(num_rows + 1);
  auto at = static_cast<int32_t>(device.reserve(num_rows + 1));
  device.add({at++, 1, 0, 0, 1});
  int32_t num_before = 0;
  for (const planner::SharedRows& rows : shared) {
    const auto length = static_cast<int32_t>(rows.length);
    const auto of_row = static_cast<int32_t>(rows.slots.size());
    device.add({at, 1, num_before + of_row, of_row, length});
    at += length;
    num_before += length * of_row;
  }

  writer.host.push_back(num_slots);
  at = static_cast<int32_t>(device.reserve(num_slots));
  for (const planner::SharedRows& rows : shared) {
    const auto length = static_cast<int32_t>(rows.length);
    const auto of_row = static_cast<int32_t>(rows.slots.size());
    for (int32_t j = 0; j < of_row; ++j) device.add({at + j, of_row, rows.slots[j], 1, length});
    at += length * of_row;
  }
}

void Writer::movement(const planner::Movement& movement) {
  for (const auto* table : {&movement.send_q_rows, &movement.recv_q_rows, &movement.send_k_rows,
                            &movement.recv_k_rows}) {
    counts(*table);
  }
  for (const auto* runs : {&movement.send_q_runs, &movement.q_slot_runs, &movement.send_k_runs,
                           &movement.k_slot_runs}) {
    section(*runs);
  }
}

void Writer::routes(const planner::Layout& layout) {
  movement(layout);
  write_reduction(layout.send_k_runs, *this);
  host.push_back(layout.keeping.has_value());
  if (!layout.keeping) return;
  const auto& [again, moved, kept] = *layout.keeping;
  movement(again);
  for (const auto* runs : {&moved.queries, &moved.keys, &kept.queries, &kept.keys}) section(*runs);
  host[kNumKeptQueries] += length_of(kept.queries);
  host[kNumKeptKeys] += length_of(kept.keys);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> encode_layout(const std::vector<PlannedRound>& rounds,
                                                 const planner::Plan& plan,
                                                 const LayoutOrigin& origin) {
  const planner::Layout& any = rounds.front().layout;
  Writer writer;
  writer.host = {kMagic,
                 0,
                 origin.step,
                 static_cast<int64_t>(plan.digest),
                 any.num_ranks,
                 any.num_home_rows,
                 origin.moves_rows,
                 plan.mask.window_left,
                 plan.mask.window_right,
                 static_cast<int64_t>(rounds.size()),
                 origin.deterministic,
                 0,
                 0,
                 any.num_context_rows,
                 0,
                 0,
                 any.rank};
  for (const PlannedRound& round : rounds) writer.routes(round.layout);
  for (const auto& [layout, peers] : rounds) {
    for (const auto* tasks : {&layout.early_tasks, &layout.late_tasks, &layout.visiting_tasks}) {
      writer.tasks(*tasks, plan.mask, origin.device_type);
    }
    writer.host.push_back(peers.has_value());
    if (peers) append_words(*peers, writer.host);
  }
  const int64_t padding = std::max<int64_t>(0, kMinLength - writer.device.size());
  writer.device.append(std::vector<int32_t>(padding, 0));
  writer.host[kLength] = static_cast<int64_t>(writer.host.size());
  writer.host[kNumCounted] = writer.device.num_counted();
  writer.host[kNumRowWords] = writer.device.size();
  return {padded_tensor(writer.host), writer.device.packed()};
}

}  // namespace distca::ops
