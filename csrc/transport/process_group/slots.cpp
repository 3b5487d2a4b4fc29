#include "slots.h"

namespace distca::transport {

Slots slots_of(const Movement& movement, int64_t rank, int64_t num_ranks, Moving moving) {
  const auto moves = [moving](const Delivery& delivery) {
    return moving == Moving::kAll || !delivery.is_kept;
  };
  const std::vector<const Delivery*> visitors = distca::visitors(movement, rank);
  const auto fill = [&](std::vector<RowPlace> Delivery::*places, auto& send_rows, auto& send_runs,
                        auto& recv_rows, auto& recv_runs) {
    send_rows.assign(num_ranks, 0);
    recv_rows.assign(num_ranks, 0);
    for (const Delivery& delivery : movement.sent) {
      if (!moves(delivery)) continue;
      for (const RowPlace& place : delivery.*places) {
        send_rows[delivery.peer] += place.num_rows;
        append_run(place.home_row, place.num_rows, send_runs);
      }
    }
    for (const Delivery* delivery : visitors) {
      if (!moves(*delivery)) continue;
      for (const RowPlace& place : delivery->*places) {
        recv_rows[delivery->peer] += place.num_rows;
        append_run(place.visiting_row, place.num_rows, recv_runs);
      }
    }
    if (recv_runs.size() == 1 && recv_runs[0].first == 0) recv_runs.clear();
  };
  Slots slots;
  fill(&Delivery::queries, slots.send_q_rows, slots.send_q_runs, slots.recv_q_rows,
       slots.recv_q_runs);
  fill(&Delivery::keys, slots.send_k_rows, slots.send_k_runs, slots.recv_k_rows, slots.recv_k_runs);
  return slots;
}

}  // namespace distca::transport
