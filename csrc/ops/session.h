#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call_times.h"
#include "core/mask.h"
#include "servers.h"
#include "signature.h"
#include "timeline.h"
#include "transport/failures.h"
#include "transport/process_group/control.h"
#include "transport/transport.h"

namespace distca::ops {

enum class Pass { kForward, kRecomputed, kBackward };
const char* name_of(Pass pass);

// Names of a session's process groups: rows, agreement on calls, planning. Each is used by nothing
// else and by one thread at a time, so that its calls stay in order. `node` has the ranks of this
// rank's node. It is empty if one transport serves all links.
struct GroupNames {
  std::string data;
  std::string control;
  std::string planning;
  std::string node;
  std::optional<std::string> servers{};  // see Servers; empty: not in its group; nullopt: none
};

// Whether rows go straight to other ranks' memory, and how.
struct PeerChoice {
  std::optional<int64_t> device;  // of this rank; nullopt: they go by the process group
  int64_t num_bytes = 0;          // least memory that a rank takes for them
  int64_t ranks_per_node = 0;     // of the hybrid transport; 0: not hybrid
};

// How many plans and batches calls may alternate between, as they do under gradient accumulation,
// in pipelines and in layers with different windows.
constexpr size_t kPlansInFlight = 256;

// A plan, and the first plan for the same documents.
struct PlanOfBatch {
  int64_t step;
  int64_t batch;
};

// One group of ranks that shares attention: its transport, its control planes and what the ranks
// have agreed on.
class Session {
 public:
  // `transport` is a name in registry.h. `peer` has a device if every rank can access every other
  // rank's memory, or that of its own node. Calls then use peer memory where they can. With a
  // node group, `transport` moves rows between nodes only.
  Session(const GroupNames& names, const std::string& configuration, double timeout_s,
          const std::string& transport, const PeerChoice& peer);

  int64_t num_ranks() const { return num_ranks_; }
  int64_t rank() const { return rank_; }
  int64_t ranks_per_node() const { return ranks_per_node_; }
  // Returns the transport for calls whose back end reads and writes visiting rows in place
  // (`in_place`), or for all other calls.
  transport::Transport& transport(bool in_place);
  // Notes that results of a forward call are home once the current stream of the device gets here.
  // Does nothing if the call moves no rows.
  void mark_results(c10::Device device, bool moves_rows);
  // Lets the current stream of that device wait for the results of the latest call so noted.
  void await_results();
  // Marks the point in the current stream of the device at which rows of a call are on their way.
  // Does nothing before the first await_dispatch().
  void mark_dispatch(c10::Device device);
  // Lets the current stream wait for the latest of these points.
  void await_dispatch();
  // See Transport::take_times. int64 [num_exchanges, fields of an ExchangeTime].
  at::Tensor take_exchange_times();
  int64_t peer_memory_bytes() const;
  // Returns the memory that other ranks write to, uint8 [peer_memory_bytes()]: two buffers, which
  // calls use in turn. Throws ValueError if there is none (yet).
  at::Tensor peer_memory() const;
  transport::FailureBoard& failures() { return *failures_; }
  transport::ControlPlane& planning() { return *planning_; }
  // Null in a group without servers.
  Servers* servers() { return servers_.get(); }
  // Throws ValueError in a group without servers.
  Servers& notices();
  std::mutex& calls() { return calls_; }
  const std::shared_ptr<Timeline>& timeline() const { return timeline_; }
  const std::shared_ptr<CallTimes>& times() const { return times_; }

  // Returns the calls that ranks last agreed on under a plan for this window, in their order, int64
  // [num_calls, fields of a call]. They are to be announced with plan `step`, the newest.
  at::Tensor agreed_calls(int64_t step, const Mask& mask);

  // Collective, on the planner's thread: compares the plan of a layout with other ranks, and
  // announces the calls that this rank expects to make under it. If all ranks announce the same
  // calls, agree() is free for these calls in this order. Throws ValueError on every rank if plans
  // differ.
  void agree_on_plan(const at::Tensor& layout, const at::Tensor& calls);

  // Makes sure that all ranks make this call. Free if the call was announced with the plan or has
  // been made under it, even if calls under up to kPlansInFlight plans alternate. Also free if the
  // plan moves no rows and ranks agreed on another call under it: agree_on_plan compares such calls
  // later. Otherwise collective: if signatures differ, throws on every rank and names the ranks and
  // the difference. `mask` and `moves_rows` are those of the plan.
  void agree(const Signature& mine, const Mask& mask, bool moves_rows);

  // This rank refuses its arguments with `error`. Before the first call under a plan for which no
  // calls were announced, the other ranks learn of it in agree(), and the group lives on. Otherwise
  // they wait for rows, and the group is lost.
  void refuse(int64_t step, const std::string& error);
  // Takes part in agree() on a call that another rank refuses, as a server.
  void agree_on_refusal(int64_t step);

  // heads_q, heads_kv, head_dim, bytes per element and v's head_dim of the last new call under a
  // plan; zeros before any.
  std::array<int64_t, 5> attention_shape() const;

  // Counts an attention call that a module (see name_caller) makes in a pass, and returns its place
  // in the step. Calls under all plans of a batch count together. Ranks compare how many calls
  // moved rows.
  transport::Where enter(Pass pass, const PlanOfBatch& plan, int64_t caller, bool moves_rows);

 private:
  // The calls that ranks agreed on under one plan, in the order in which they are first made.
  struct Agreement {
    int64_t step;
    std::vector<Signature> calls;
    size_t num_made = 0;  // the other calls were announced, but not made yet
  };
  // The calls of a rank from its first call under one plan to its first call under the next.
  struct History {
    int64_t before = -1, step = -1;  // the plans; -1: none
    Signature calls;                 // the last new call, and the counts
  };
  // The attention calls of one batch. Its layers may have several plans.
  struct Batch {
    int64_t number;
    int64_t num_forward = 0;
    int64_t num_backward = 0;
  };

  at::Tensor peer_buffers() const;  // undefined if there are none
  Agreement* agreement_on(int64_t step);
  Agreement& new_agreement(int64_t step);
  // Announcements of older plans do not count. The training thread alone decides this, so that it
  // is equal on all ranks, however far their planner's threads are.
  int64_t first_announced() const {
    return newest_plan_ + 1 - static_cast<int64_t>(kPlansInFlight);
  }
  Batch& batch_of(int64_t number);
  std::string activity_of(const Signature& mine, const Agreement* agreement) const;
  bool makes_agreed_call(Agreement& agreement, const Signature& mine);
  void note_new_call(const Signature& call);
  std::vector<Signature> gather(const Signature& mine, const std::string& activity);
  void check_history(const std::vector<Signature>& all, Signature::Field first,
                     const transport::Where& where);

  // Collective: returns what every rank says, [num_ranks]. Ranks meet on the control plane, as for
  // agreements. On every rank, a call meets after its own agreement and before that of the next
  // call, so the order is the same. While it waits, it holds no lock but that of the channel.
  std::vector<int64_t> meet(int64_t says, const transport::Where& where);

  mutable std::mutex mutex_;
  std::mutex calls_;  // held by one operator at a time: threads share the transports
  std::shared_ptr<Timeline> timeline_ = std::make_shared<Timeline>();
  std::shared_ptr<CallTimes> times_ = std::make_shared<CallTimes>();
  bool is_followed_ = false;            // whether await_dispatch() has been called
  std::optional<c10::Event> dispatch_;  // rows of the latest call are on their way
  std::optional<c10::Event> results_;   // of the latest forward call that moved rows are home
  std::shared_ptr<transport::FailureBoard> failures_;
  std::unique_ptr<transport::ControlPlane> control_;
  std::unique_ptr<transport::ControlPlane> planning_;
  std::unique_ptr<Servers> servers_;
  std::shared_ptr<transport::Transport> transport_;
  std::shared_ptr<transport::Transport> peer_transport_;
  std::shared_ptr<transport::Transport> hybrid_;  // transport_, and another inside nodes
  int64_t ranks_per_node_;
  int64_t rank_;
  int64_t num_ranks_;
  int64_t newest_plan_ = -1;
  std::map<int64_t, std::vector<Signature>> announced_;  // by plan that no call used yet
  std::deque<Agreement> agreements_;                     // for plans in flight, the newest last
  std::deque<Batch> batches_;                            // likewise
  std::map<std::pair<int64_t, int64_t>, std::vector<Signature>> agreed_calls_;  // by window
  History history_;   // up to the last plan that calls began to use
  Signature latest_;  // the last new call under a plan, and the counts since then
};

// Sessions by group name. find_session throws ValueError if there is none, and names the call that
// opens one. `configuration` is a text of the settings that must be equal on all ranks.
void open_session(const GroupNames& names, const std::string& configuration, double timeout_s,
                  const std::string& transport, const PeerChoice& peer);
void close_session(const std::string& group_name);
std::shared_ptr<Session> find_session(const std::string& group_name);

// Returns the timeline of a session or, without a group name, that of all calls under plans of a
// single rank.
std::shared_ptr<Timeline> timeline_of(const std::string& group_name);

}  // namespace distca::ops
