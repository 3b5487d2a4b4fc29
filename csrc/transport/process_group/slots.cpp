#include "slots.h"

#include <algorithm>

namespace distca::transport {
namespace {

bool moves(const Delivery& delivery, Moving moving) {
  return moving == Moving::kAll || !delivery.is_kept;
}

using Places = std::vector<RowPlace> Delivery::*;

void fill_sends(const Movement& movement, Places places, Moving moving,
                std::vector<int64_t>& num_rows, std::vector<Run>& home_rows) {
  for (const Delivery& delivery : movement.sent) {
    if (!moves(delivery, moving)) continue;
    for (const RowPlace& place : delivery.*places) {
      num_rows[delivery.peer] += place.num_rows;
      append_run(place.home_row, place.num_rows, home_rows);
    }
  }
}

void fill_receives(const std::vector<const Delivery*>& visitors, Places places, Moving moving,
                   std::vector<int64_t>& num_rows, std::vector<Run>& slots) {
  struct Arrival {
    int64_t visiting_row, slot, num_rows;
  };
  std::vector<Arrival> arrivals;
  int64_t slot = 0;
  for (const Delivery* delivery : visitors) {
    if (!moves(*delivery, moving)) continue;
    for (const RowPlace& place : delivery->*places) {
      arrivals.push_back({place.visiting_row, slot, place.num_rows});
      num_rows[delivery->peer] += place.num_rows;
      slot += place.num_rows;
    }
  }
  const auto by_visiting_row = [](const Arrival& a, const Arrival& b) {
    return a.visiting_row < b.visiting_row;
  };
  if (std::is_sorted(arrivals.begin(), arrivals.end(), by_visiting_row)) return;
  std::sort(arrivals.begin(), arrivals.end(), by_visiting_row);
  for (const Arrival& arrival : arrivals) append_run(arrival.slot, arrival.num_rows, slots);
}

}  // namespace

Slots slots_of(const Movement& movement, int64_t rank, int64_t num_ranks, Moving moving) {
  Slots slots;
  for (std::vector<int64_t>* rows :
       {&slots.send_q_rows, &slots.recv_q_rows, &slots.send_k_rows, &slots.recv_k_rows}) {
    rows->assign(num_ranks, 0);
  }
  const std::vector<const Delivery*> visitors = distca::visitors(movement, rank);
  fill_sends(movement, &Delivery::queries, moving, slots.send_q_rows, slots.send_q_runs);
  fill_sends(movement, &Delivery::keys, moving, slots.send_k_rows, slots.send_k_runs);
  fill_receives(visitors, &Delivery::queries, moving, slots.recv_q_rows, slots.q_slot_runs);
  fill_receives(visitors, &Delivery::keys, moving, slots.recv_k_rows, slots.k_slot_runs);
  return slots;
}

}  // namespace distca::transport
