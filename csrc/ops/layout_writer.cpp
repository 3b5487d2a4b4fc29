#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <bit>
#include <utility>

#include "layout_tensor.h"
#include "layout_words.h"
#include "row_words.h"
#include "transport/process_group/slots.h"

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
  void places(const std::vector<RowPlace>& places);
  void deliveries(const std::vector<Delivery>& deliveries);
  void slots(const transport::Slots& slots);
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
  const std::vector<SharedRows> shared = shared_rows(runs);
  int64_t num_rows = 0, num_slots = 0;
  for (const SharedRows& rows : shared) {
    num_rows += rows.length;
    num_slots += rows.length * static_cast<int64_t>(rows.slots.size());
  }
  RowWords& device = writer.device;
  writer.host.push_back(num_rows);
  for (const SharedRows& rows : shared) device.append_counted(rows.first, rows.length);

  writer.host.push_back(num_rows + 1);
  auto at = static_cast<int32_t>(device.reserve(num_rows + 1));
  device.add({at++, 1, 0, 0, 1});
  int32_t num_before = 0;
  for (const SharedRows& rows : shared) {
    const auto length = static_cast<int32_t>(rows.length);
    const auto of_row = static_cast<int32_t>(rows.slots.size());
    device.add({at, 1, num_before + of_row, of_row, length});
    at += length;
    num_before += length * of_row;
  }

  writer.host.push_back(num_slots);
  at = static_cast<int32_t>(device.reserve(num_slots));
  for (const SharedRows& rows : shared) {
    const auto length = static_cast<int32_t>(rows.length);
    const auto of_row = static_cast<int32_t>(rows.slots.size());
    for (int32_t j = 0; j < of_row; ++j) device.add({at + j, of_row, rows.slots[j], 1, length});
    at += length * of_row;
  }
}

void Writer::places(const std::vector<RowPlace>& places) {
  host.push_back(static_cast<int64_t>(places.size()));
  for (const auto& [home_row, visiting_row, result_row, num_rows] : places) {
    counts({home_row, visiting_row, result_row, num_rows});
  }
}

void Writer::deliveries(const std::vector<Delivery>& deliveries) {
  host.push_back(static_cast<int64_t>(deliveries.size()));
  for (const Delivery& delivery : deliveries) {
    counts({delivery.peer, delivery.is_kept});
    places(delivery.queries);
    places(delivery.keys);
  }
}

void Writer::slots(const transport::Slots& slots) {
  for (const auto* runs :
       {&slots.send_q_runs, &slots.q_slot_runs, &slots.send_k_runs, &slots.k_slot_runs}) {
    section(*runs);
  }
}

void Writer::routes(const planner::Layout& layout) {
  const Movement& movement = layout.movement;
  counts({movement.max_visiting_q, movement.max_visiting_k, movement.max_returned_q,
          movement.max_returned_k});
  deliveries(movement.sent);
  deliveries(movement.received);
  const auto slots_for = [&](transport::Moving moving) {
    return transport::slots_of(movement, layout.rank, layout.num_ranks, moving);
  };
  const transport::Slots all = slots_for(transport::Moving::kAll);
  slots(all);
  write_reduction(all.send_k_runs, *this);
  if (!keeps_any(movement)) return;
  slots(slots_for(transport::Moving::kNotKept));
  const VisitingRuns moved = visiting_runs(movement, layout.rank, false);
  const VisitingRuns kept = visiting_runs(movement, layout.rank, true);
  for (const auto* runs : {&moved.queries, &moved.keys, &kept.queries, &kept.keys}) section(*runs);
  host[kNumKeptQueries] += length_of(kept.queries);
  host[kNumKeptKeys] += length_of(kept.keys);
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> encode_layout(const std::vector<planner::Layout>& rounds,
                                                 const planner::Plan& plan,
                                                 const LayoutOrigin& origin) {
  const planner::Layout& any = rounds.front();
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
                 any.rank,
                 origin.batch};
  for (const planner::Layout& round : rounds) writer.routes(round);
  for (const planner::Layout& round : rounds) {
    for (const auto* tasks : {&round.early_tasks, &round.late_tasks, &round.visiting_tasks}) {
      writer.tasks(*tasks, plan.mask, origin.device_type);
    }
  }
  const int64_t padding = std::max<int64_t>(0, kMinLength - writer.device.size());
  writer.device.append(std::vector<int32_t>(padding, 0));
  writer.host[kLength] = static_cast<int64_t>(writer.host.size());
  writer.host[kNumCounted] = writer.device.num_counted();
  writer.host[kNumRowWords] = writer.device.size();
  return {padded_tensor(writer.host), writer.device.packed()};
}

}  // namespace distca::ops
