#pragma once

#include <c10/core/Event.h>

#include <deque>
#include <mutex>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "../watchdog.h"

namespace distca::transport {

// Streams of a device that wait for exchanges of a process group. Aborting the group's communicator
// releases them.
class WorksWatch : public Watched {
 public:
  WorksWatch(c10::intrusive_ptr<c10d::ProcessGroup> group, c10::Device device)
      : group_(std::move(group)), device_(device) {}

  // The device's current stream has just been told to wait for an exchange.
  void add(const Where& where);

  State look() override;
  Where place() override;
  void release() override;

 private:
  struct Wait {
    c10::Event end;
    Where where;
  };

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  c10::Device device_;
  std::mutex mutex_;
  std::deque<Wait> waits_;  // that have not ended at the last look
};

}  // namespace distca::transport
