#include "movement.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace distca {

void append_run(int64_t first, int64_t length, std::vector<Run>& runs) {
  if (!runs.empty() && runs.back().first + runs.back().length == first) {
    runs.back().length += length;
  } else {
    runs.push_back({first, length});
  }
}

bool keeps_any(const Movement& movement) {
  const auto is_kept = [](const Delivery& delivery) { return delivery.is_kept; };
  return std::any_of(movement.sent.begin(), movement.sent.end(), is_kept) ||
         std::any_of(movement.received.begin(), movement.received.end(), is_kept);
}

std::vector<const Delivery*> visitors(const Movement& movement, int64_t rank) {
  std::vector<const Delivery*> all;
  const auto add = [&](const std::vector<Delivery>& deliveries, auto&& is_meant) {
    for (const Delivery& delivery : deliveries) {
      if (is_meant(delivery.peer)) all.push_back(&delivery);
    }
  };
  add(movement.received, [rank](int64_t home) { return home < rank; });
  add(movement.sent, [rank](int64_t server) { return server == rank; });
  add(movement.received, [rank](int64_t home) { return home > rank; });
  return all;
}

VisitingRuns kept_runs(const Movement& movement, int64_t rank) {
  VisitingRuns kept;
  const auto add = [&](std::vector<RowPlace> Delivery::*places, std::vector<Run>& runs) {
    std::vector<Run> parts;
    for (const Delivery* delivery : visitors(movement, rank)) {
      if (!delivery->is_kept) continue;
      for (const RowPlace& place : delivery->*places) {
        parts.push_back({place.visiting_row, place.num_rows});
      }
    }
    std::sort(parts.begin(), parts.end(),
              [](const Run& a, const Run& b) { return a.first < b.first; });
    for (const Run& part : parts) append_run(part.first, part.length, runs);
  };
  add(&Delivery::queries, kept.queries);
  add(&Delivery::keys, kept.keys);
  return kept;
}

std::vector<SharedRows> shared_rows(const std::vector<Run>& runs) {
  struct End {
    int64_t row;
    int64_t first_slot;  // of the run
    bool opens;
  };
  std::vector<End> ends;
  int64_t slot = 0;
  for (const Run& run : runs) {
    ends.push_back({run.first, slot, true});
    ends.push_back({run.first + run.length, slot, false});
    slot += run.length;
  }
  std::sort(ends.begin(), ends.end(), [](const End& a, const End& b) {
    return std::tie(a.row, a.first_slot) < std::tie(b.row, b.first_slot);
  });
  std::vector<SharedRows> shared;
  std::vector<std::pair<int64_t, int64_t>> open;  // (first slot, first row) of runs, sorted
  for (size_t i = 0; i < ends.size();) {
    const int64_t row = ends[i].row;
    for (; i < ends.size() && ends[i].row == row; ++i) {
      const auto at =
          std::lower_bound(open.begin(), open.end(), std::pair{ends[i].first_slot, int64_t{-1}});
      if (ends[i].opens) {
        open.insert(at, {ends[i].first_slot, row});
      } else {
        open.erase(at);
      }
    }
    if (open.empty()) continue;
    shared.push_back({row, ends[i].row - row, {}});
    for (const auto& [first_slot, first_row] : open) {
      shared.back().slots.push_back(static_cast<int32_t>(first_slot + row - first_row));
    }
  }
  return shared;
}

std::vector<KeyGradients> key_gradients(const Movement& movement) {
  struct SentKeys {
    int64_t server;
    int64_t result_row;
    int64_t first_slot;
  };
  std::vector<Run> runs;
  std::vector<SentKeys> sent;
  int64_t slot = 0;
  for (const Delivery& delivery : movement.sent) {
    for (const RowPlace& place : delivery.keys) {
      runs.push_back({place.home_row, place.num_rows});
      sent.push_back({delivery.peer, place.result_row, slot});
      slot += place.num_rows;
    }
  }
  std::vector<KeyGradients> gradients;
  for (const SharedRows& shared : shared_rows(runs)) {
    KeyGradients& rows =
        gradients.emplace_back(shared.first, shared.length, std::vector<KeyGradients::Source>{});
    for (const int64_t first : shared.slots) {
      const auto after = std::partition_point(
          sent.begin(), sent.end(), [first](const SentKeys& s) { return s.first_slot <= first; });
      const SentKeys& keys = *(after - 1);
      rows.sources.push_back({keys.server, keys.result_row + first - keys.first_slot});
    }
  }
  return gradients;
}

Range node_of(int64_t rank, int64_t num_ranks, int64_t ranks_per_node) {
  const int64_t first = rank / ranks_per_node * ranks_per_node;
  return {first, std::min(first + ranks_per_node, num_ranks)};
}

Part part_of(const Movement& movement, Range node, Reach reach) {
  const auto is_meant = [&](const Delivery& delivery) {
    const bool is_inside = node.begin <= delivery.peer && delivery.peer < node.end;
    return is_inside == (reach == Reach::kInside);
  };
  const int64_t first_rank = reach == Reach::kInside ? node.begin : 0;
  Part part{movement, {}};
  for (auto* deliveries : {&part.movement.sent, &part.movement.received}) {
    std::erase_if(*deliveries, [&](const Delivery& delivery) { return !is_meant(delivery); });
    for (Delivery& delivery : *deliveries) delivery.peer -= first_rank;
  }
  int64_t row = 0;
  for (const Delivery& delivery : movement.sent) {
    for (const RowPlace& place : delivery.keys) {
      if (is_meant(delivery)) {
        part.key_results.push_back(
            {row, place.num_rows, {{delivery.peer - first_rank, place.result_row}}});
      }
      row += place.num_rows;
    }
  }
  return part;
}

}  // namespace distca
