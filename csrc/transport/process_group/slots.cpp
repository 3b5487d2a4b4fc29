#include "slots.h"

#include <algorithm>

namespace distca::transport {
namespace {

struct Arrival {
  int64_t visiting_row, slot, num_rows;
};

}  // namespace

Slots slots_of(const Movement& movement, int64_t rank, int64_t num_ranks, Moving moving) {
  const auto moves = [moving](const Delivery& delivery) {
    return moving == Moving::kAll || !delivery.is_kept;
  };
  const std::vector<const Delivery*> visitors = distca::visitors(movement, rank);
  const auto fill = [&](std::vector<RowPlace> Delivery::*places, auto& send_rows, auto& send_runs,
                        auto& recv_rows, auto& slot_runs) {
    send_rows.assign(num_ranks, 0);
    recv_rows.assign(num_ranks, 0);
    for (const Delivery& delivery : movement.sent) {
      if (!moves(delivery)) continue;
      for (const RowPlace& place : delivery.*places) {
        send_rows[delivery.peer] += place.num_rows;
        append_run(place.home_row, place.num_rows, send_runs);
      }
    }
    std::vector<Arrival> arrivals;
    int64_t slot = 0;
    for (const Delivery* delivery : visitors) {
      if (!moves(*delivery)) continue;
      for (const RowPlace& place : delivery->*places) {
        arrivals.push_back({place.visiting_row, slot, place.num_rows});
        recv_rows[delivery->peer] += place.num_rows;
        slot += place.num_rows;
      }
    }
    if (std::ranges::is_sorted(arrivals, {}, &Arrival::visiting_row)) return;
    std::ranges::sort(arrivals, {}, &Arrival::visiting_row);
    for (const Arrival& arrival : arrivals) append_run(arrival.slot, arrival.num_rows, slot_runs);
  };
  Slots slots;
  fill(&Delivery::queries, slots.send_q_rows, slots.send_q_runs, slots.recv_q_rows,
       slots.q_slot_runs);
  fill(&Delivery::keys, slots.send_k_rows, slots.send_k_runs, slots.recv_k_rows, slots.k_slot_runs);
  return slots;
}

}  // namespace distca::transport
