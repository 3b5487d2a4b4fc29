#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "../host_words.h"
#include "../rows.h"
#ifdef DISTCA_WITH_CUDA
#include "../streams.h"
#endif
#include "../watchdog.h"
#include "patience.h"

namespace distca::transport {

// Watches the streams of a device that wait for exchanges of a process group. Aborting the group's
// communicator releases them. Until then the watchdog does not use the CUDA driver: see HostWords.
class WorksWatch : public Watched {
 public:
  WorksWatch(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device,
             std::string group_name, int64_t rank);

  // Notes that the device's current stream has just been told to wait for an exchange's works.
  void add(const Patience::Works& works, const Wait& wait);

  // Returns the seal for a call's rows.
  Seal seal(const Where& where);

  State look() override;
  Wait place() override;
  std::string complaint() override;
  void release() override;

 private:
  struct Waiting {
    uint32_t number;  // counts the waits, from 1
    Wait wait;
  };

  bool has_ended(const Waiting& waiting) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  int64_t rank_;
#ifdef DISTCA_WITH_CUDA
  HostWords broken_;    // seals, by BrokenSeal
  HostWords ended_;     // numbers of waits that ended, by their remainder
  at::Tensor spoiled_;  // see Seal
  // Writes `ended_`; on the caller's stream that write would delay compute. It is not from
  // PyTorch's pool, because user work on a pooled stream would wait for other ranks.
  OwnStream marks_;
#endif
  std::mutex mutex_;
  uint32_t num_waits_ = 0;
  std::deque<Waiting> waits_;  // those that had not ended at the last look
  Wait latest_;
};

}  // namespace distca::transport
