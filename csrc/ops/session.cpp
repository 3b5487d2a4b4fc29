#include "session.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/ScalarType.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "layout_tensor.h"
#include "transport/hybrid/hybrid.h"
#include "transport/registry.h"
#include "version.h"

namespace distca::ops {
namespace {

constexpr const char* kSameModel =
    ". All ranks of a group must run the same model on the same plan.";

constexpr int64_t kNumCallFields = Signature::kFirstOfHistory - Signature::kFirstOfCall;

// What a rank sends about a plan. The fields of the calls that it announces follow.
struct Announcement {
  Signature plan;  // the other fields hold the last new call and the counts of a History
  int64_t before = -1, after = -1;  // the plans of that History
};
static_assert(std::is_trivially_copyable_v<Announcement>);

struct Registry {
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Session>> sessions;
};

Registry& registry() {
  // Never destroyed: process groups must not be torn down by static destructors.
  static Registry* instance = new Registry;
  return *instance;
}

// Lets the current stream of the event's device wait for it.
void block_on(std::optional<c10::Event>& event) {
  if (!event) return;
  event->block(c10::impl::VirtualGuardImpl(event->device().type()).getStream(event->device()));
}

// Records the current stream of `device` in an event, which is created at first.
void record(std::optional<c10::Event>& event, c10::Device device) {
  if (!event) event.emplace(device.type());
  event->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace

const char* name_of(Pass pass) {
  if (pass == Pass::kRecomputed) return "recomputed forward";
  return pass == Pass::kForward ? "forward" : "backward";
}

Session::Session(const GroupNames& names, const std::string& configuration, double timeout_s,
                 const std::string& transport, const PeerChoice& peer)
    : ranks_per_node_(peer.ranks_per_node) {
  const auto data = c10d::resolve_process_group(names.data);
  const auto control = c10d::resolve_process_group(names.control);
  const auto planning = c10d::resolve_process_group(names.planning);
  rank_ = data->getRank();
  num_ranks_ = data->getSize();
  failures_ =
      std::make_shared<transport::FailureBoard>(control->getStore(), names.data, rank_, num_ranks_);
  using transport::Patience;
  const auto layers = std::make_shared<Patience>(failures_, transport::kLayers);
  const auto plans = std::make_shared<Patience>(failures_, transport::kPlans);
  // Agreements have a channel of their own. A rank remembers only its latest exchanges of rows, so
  // one that ran ahead would seem to have begun the agreement that another rank waits in.
  const auto agreements = std::make_shared<Patience>(failures_, transport::kAgreements);
  control_ = std::make_unique<transport::ControlPlane>(control, agreements);
  failures_->introduce(control_->gather(failures_->introduction(configuration),
                                        {"opening of the group", "", -1, -1},
                                        "the opening of the group"));
  planning_ = std::make_unique<transport::ControlPlane>(planning, plans);
  planning_->set_awaited(false);  // a thread in the background waits there
  if (names.servers) {
    const auto group = names.servers->empty() ? c10::intrusive_ptr<c10d::ProcessGroup>{}
                                              : c10d::resolve_process_group(*names.servers);
    servers_ = std::make_unique<Servers>(group, failures_, timeout_s);
  }
  transport_ = transport::open_transport(transport, {data, layers, failures_, timeout_s});
  const std::string& node_name = names.node.empty() ? names.data : names.node;
  const auto node = c10d::resolve_process_group(node_name);
  if (peer.device) {
    const c10::Device own(c10::kCUDA, static_cast<c10::DeviceIndex>(*peer.device));
    const c10::DeviceGuard guard(own);
    peer_transport_ = transport::open_peer(
        {{node_name, node->getRank(), node->getSize(), own, rank_ - node->getRank()},
         [this](int64_t says, const transport::Where& where) { return meet(says, where); },
         peer.num_bytes,
         failures_,
         timeout_s});
  }
  if (names.node.empty()) return;
  std::shared_ptr<transport::Transport> inside = peer_transport_;
  if (!inside) inside = transport::open_process_group({node, layers, failures_, timeout_s});
  hybrid_ = std::make_shared<transport::HybridTransport>(inside, transport_);
}

std::vector<int64_t> Session::meet(int64_t says, const transport::Where& where) {
  const at::Tensor all =
      control_->all_gather(at::scalar_tensor(says, at::kLong), where, where.phase);
  const auto* first = all.const_data_ptr<int64_t>();
  return {first, first + num_ranks_};
}

transport::Transport& Session::transport(bool in_place) {
  if (hybrid_ && (in_place || !peer_transport_)) return *hybrid_;
  if (peer_transport_ && in_place) return *peer_transport_;
  return *transport_;
}

void Session::mark_results(c10::Device device, bool moves_rows) {
  if (device.is_cpu() || !moves_rows) return;
  record(results_, device);
}

void Session::await_results() {
  block_on(results_);
}

void Session::mark_dispatch(c10::Device device) {
  if (device.is_cpu() || !is_followed_) return;
  record(dispatch_, device);
}

void Session::await_dispatch() {
  is_followed_ = true;
  block_on(dispatch_);
}

at::Tensor Session::take_exchange_times() {
  const std::vector<transport::ExchangeTime> times = transport_->take_times();
  const at::Tensor words = at::empty({static_cast<int64_t>(times.size()), 4}, at::kLong);
  int64_t* word = words.mutable_data_ptr<int64_t>();
  for (const auto& [is_backward, is_combine, num_bytes, nanoseconds] : times) {
    for (const int64_t value : {int64_t{is_backward}, int64_t{is_combine}, num_bytes, nanoseconds})
      *word++ = value;
  }
  return words;
}

Servers& Session::notices() {
  TORCH_CHECK_VALUE(servers_,
                    "distca: no rank of this group is a server; pass `servers` to distca.init");
  return *servers_;
}

at::Tensor Session::peer_buffers() const {
  return peer_transport_ ? peer_transport_->shared_memory() : at::Tensor();
}

int64_t Session::peer_memory_bytes() const {
  const at::Tensor buffers = peer_buffers();
  return buffers.defined() ? buffers.numel() : 0;
}

at::Tensor Session::peer_memory() const {
  const at::Tensor buffers = peer_buffers();
  TORCH_CHECK_VALUE(
      buffers.defined(),
      "distca: no rows have travelled through peer memory in this group; set "
      "transport to peer, and call core_attention under a plan that moves rows first");
  return buffers;
}

Session::Agreement* Session::agreement_on(int64_t step) {
  const auto found = std::find_if(agreements_.rbegin(), agreements_.rend(),
                                  [step](const Agreement& each) { return each.step == step; });
  if (found != agreements_.rend()) return &*found;
  auto announced = announced_.extract(step);
  if (announced.empty() || step < first_announced()) return nullptr;
  Agreement& agreement = new_agreement(step);
  agreement.calls = std::move(announced.mapped());
  return &agreement;
}

// Must be called at the first call under a plan, which all ranks' programs make at the same point.
Session::Agreement& Session::new_agreement(int64_t step) {
  if (agreements_.size() == kPlansInFlight) agreements_.pop_front();
  history_ = {history_.step, step, latest_};
  std::fill(latest_.values.begin() + Signature::kFirstOfHistory, latest_.values.end(), 0);
  return agreements_.emplace_back(step);
}

Session::Batch& Session::batch_of(int64_t number) {
  const auto found = std::find_if(batches_.rbegin(), batches_.rend(),
                                  [number](const Batch& each) { return each.number == number; });
  if (found != batches_.rend()) return *found;
  if (batches_.size() == kPlansInFlight) batches_.pop_front();
  return batches_.emplace_back(number);
}

std::vector<Signature> Session::gather(const Signature& mine, const std::string& activity) {
  constexpr int64_t num_fields = Signature::kNumFields;
  at::Tensor sent = at::empty({num_fields}, at::kLong);
  std::memcpy(sent.mutable_data_ptr<int64_t>(), mine.values.data(), sizeof(mine.values));
  const transport::Where where{"agreement", "", -1, mine.values[Signature::kStep]};
  const Range range(*timeline_, {where.phase, "", -1, -1}, at::kCPU);  // of no layer
  const at::Tensor received = control_->all_gather(sent, where, activity);
  std::vector<Signature> all(num_ranks_);
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    std::memcpy(all[rank].values.data(), received.const_data_ptr<int64_t>() + rank * num_fields,
                sizeof(mine.values));
  }
  return all;
}

// Finds calls that a rank left out, or made in addition, at the end of a plan. On devices the other
// ranks may still wait in them.
void Session::check_history(const std::vector<Signature>& all, Signature::Field first,
                            const transport::Where& where) {
  const std::string difference = differences(all, first, Signature::kNumFields);
  if (difference.empty()) return;
  const std::string sentence =
      "ranks made different attention calls since they last agreed on a plan: " + difference +
      transport::kSameCalls;
  failures_->announce_mismatch(sentence);
  TORCH_CHECK_WITH(DistBackendError, false, "distca: ", describe(where), ": ", sentence,
                   ". Restart the job from its last checkpoint");
}

at::Tensor Session::agreed_calls(int64_t step, const Mask& mask) {
  std::lock_guard<std::mutex> lock(mutex_);
  newest_plan_ = step;
  const auto found = agreed_calls_.find({mask.window_left, mask.window_right});
  const auto num_calls =
      found == agreed_calls_.end() ? 0 : static_cast<int64_t>(found->second.size());
  at::Tensor calls = at::empty({num_calls, kNumCallFields}, at::kLong);
  int64_t* next = calls.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < num_calls; ++i, next += kNumCallFields) {
    std::copy_n(&found->second[i].values[Signature::kFirstOfCall], kNumCallFields, next);
  }
  return calls;
}

void Session::agree_on_plan(const at::Tensor& layout, const at::Tensor& calls) {
  TORCH_CHECK_VALUE(calls.device().is_cpu() && calls.scalar_type() == at::kLong &&
                        calls.dim() == 2 && calls.size(1) == kNumCallFields &&
                        calls.is_contiguous(),
                    "calls: expected int64 [num_calls, ", kNumCallFields, "] on the CPU, got ",
                    calls.toString(), " of shape ", calls.sizes());
  const PlanIdentity plan = identity_of(layout);
  Announcement mine;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    mine = {history_.calls, history_.before, history_.step};
  }
  std::ranges::copy(
      std::array<int64_t, Signature::kFirstOfCall>{0, kVersion, plan.step, plan.digest},
      mine.plan.values.begin());
  std::string text(reinterpret_cast<const char*>(&mine), sizeof(mine));
  text.append(static_cast<const char*>(calls.const_data_ptr()), calls.nbytes());
  const transport::Where where{"agreement on a plan", "", -1, plan.step};
  const std::vector<std::string> texts = planning_->gather(text, where, "the plan of a step");

  std::vector<Signature> all;
  bool same_history = true, same_calls = true;
  for (const std::string& theirs : texts) {
    Announcement announced;
    std::copy_n(theirs.data(), std::min(theirs.size(), sizeof(announced)),
                reinterpret_cast<char*>(&announced));
    all.push_back(announced.plan);
    same_history &= announced.before == mine.before && announced.after == mine.after;
    same_calls &= theirs.substr(sizeof(mine)) == text.substr(sizeof(mine));
  }
  const std::string difference = differences(all, Signature::kVersion, Signature::kFirstOfCall);
  TORCH_CHECK_VALUE(difference.empty(),
                    "distca: ranks disagree on core attention, nothing was sent: ", difference,
                    kSameModel);
  if (same_history) check_history(all, Signature::kFirstOfCall, where);
  if (!same_calls || calls.size(0) == 0) return;
  std::lock_guard<std::mutex> lock(mutex_);
  announced_.erase(announced_.begin(), announced_.lower_bound(first_announced()));
  std::vector<Signature>& announced = announced_[plan.step];
  const auto* next = calls.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < calls.size(0); ++i, next += kNumCallFields) {
    Signature& call = announced.emplace_back();
    call.values = {0, kVersion, plan.step, plan.digest};
    std::copy_n(next, kNumCallFields, &call.values[Signature::kFirstOfCall]);
  }
}

std::string Session::activity_of(const Signature& mine, const Agreement* agreement) const {
  if (agreement == nullptr) return "the agreement before the first layer";
  // After that, the other ranks may not take part in an agreement: the text must describe the call.
  const bool is_expected = agreement->num_made < agreement->calls.size();
  const Signature* announced = is_expected ? &agreement->calls[agreement->num_made] : nullptr;
  return "an agreement on " + description_of(mine, announced);
}

// Returns whether this call needs no agreement under its plan. Announced calls count only in their
// order: a rank that makes them in another order makes other calls than the other ranks.
bool Session::makes_agreed_call(Agreement& agreement, const Signature& mine) {
  const auto made = agreement.calls.begin() + static_cast<int64_t>(agreement.num_made);
  if (std::find(agreement.calls.begin(), made, mine) != made) return true;
  if (made == agreement.calls.end() || *made != mine) return false;
  note_new_call(mine);
  ++agreement.num_made;
  return true;
}

void Session::note_new_call(const Signature& call) {
  std::copy_n(call.values.begin(), Signature::kFirstOfHistory, latest_.values.begin());
}

void Session::agree(const Signature& mine, const Mask& mask, bool moves_rows) {
  std::unique_lock<std::mutex> lock(mutex_);
  const int64_t step = mine.values[Signature::kStep];
  Agreement* agreement = agreement_on(step);
  if (agreement && makes_agreed_call(*agreement, mine)) return;
  // No rows travel. If this rank alone made this call and waited, no other rank would notice.
  if (agreement && !moves_rows) return note_new_call(mine);
  Signature whole = latest_;
  std::copy_n(mine.values.begin(), Signature::kFirstOfHistory, whole.values.begin());
  const std::string activity = activity_of(mine, agreement);
  lock.unlock();  // so that the planner's thread can go on
  const auto all = gather(whole, activity);
  check_history(all, Signature::kFirstOfHistory, {"agreement", "", -1, step});
  std::string refused;
  for (int64_t rank = 0; rank < num_ranks_; ++rank) {
    if (all[rank].values[Signature::kRefused] != 0) refused += " " + std::to_string(rank);
  }
  // The refusing rank throws its own, more precise error after this call.
  if (mine.values[Signature::kRefused] != 0) return;
  TORCH_CHECK_VALUE(refused.empty(), "distca: step ", step,
                    ": the arguments of core attention were refused on rank(s)", refused,
                    "; nothing was sent. See the error on that rank.");
  const std::string difference = differences(all, Signature::kVersion, Signature::kFirstOfHistory);
  TORCH_CHECK_VALUE(difference.empty(),
                    "distca: ranks disagree on core attention, nothing was sent: ", difference,
                    kSameModel);
  lock.lock();
  if (agreement == nullptr) agreement = &new_agreement(step);
  agreement->calls.resize(agreement->num_made++);
  agreement->calls.push_back(mine);
  note_new_call(mine);
  agreed_calls_[{mask.window_left, mask.window_right}] = agreement->calls;
}

void Session::refuse(int64_t step, const std::string& error) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // Without a readable layout (step -1), assume that the other ranks are further on already.
    if (agreement_on(step) || (step < 0 && !agreements_.empty())) return failures_->announce(error);
  }
  if (servers_) servers_->tell({.kind = Notice::kRefused, .step = step});
  agree_on_refusal(step);
}

void Session::agree_on_refusal(int64_t step) {
  Signature refused;
  refused.values[Signature::kRefused] = 1;
  refused.values[Signature::kStep] = step;
  agree(refused, {}, false);
}

std::array<int64_t, 5> Session::attention_shape() const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto& values = latest_.values;
  if (values[Signature::kHeadsQ] == 0) return {};
  const auto dtype = static_cast<c10::ScalarType>(values[Signature::kDtype]);
  return {values[Signature::kHeadsQ], values[Signature::kHeadsKv], values[Signature::kHeadDim],
          static_cast<int64_t>(c10::elementSize(dtype)), values[Signature::kHeadDimV]};
}

transport::Where Session::enter(Pass pass, const PlanOfBatch& plan, int64_t caller,
                                bool moves_rows) {
  std::lock_guard<std::mutex> lock(mutex_);
  Batch& batch = batch_of(plan.batch);
  transport::Where where{"", name_of(pass), 0, plan.step, caller};
  int64_t field = Signature::kForwardCalls;
  // Backward passes go from the last layer to the first. Those of a tick of a pipeline, whose
  // forward passes had other plans, count up.
  const auto backward_layer = [&batch](int64_t num_before) {
    return batch.num_forward > 0 ? batch.num_forward - num_before - 1 : num_before;
  };
  if (pass == Pass::kBackward) {
    where.layer = backward_layer(batch.num_backward++);
    field = Signature::kBackwardCalls;
  } else if (pass == Pass::kRecomputed) {
    where.layer = backward_layer(batch.num_backward);
    field = Signature::kRecomputedCalls;
  } else {
    where.layer = batch.num_forward++;
  }
  if (moves_rows) ++latest_.values[field];
  return where;
}

void open_session(const GroupNames& names, const std::string& configuration, double timeout_s,
                  const std::string& transport, const PeerChoice& peer) {
  auto session = std::make_shared<Session>(names, configuration, timeout_s, transport, peer);
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().sessions[names.data] = std::move(session);
}

void close_session(const std::string& group_name) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  registry().sessions.erase(group_name);
}

std::shared_ptr<Session> find_session(const std::string& group_name) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  const auto found = registry().sessions.find(group_name);
  TORCH_CHECK_VALUE(found != registry().sessions.end(), "distca: no session for process group '",
                    group_name, "'; call distca.init(group) on every rank of the group first");
  return found->second;
}

std::shared_ptr<Timeline> timeline_of(const std::string& group_name) {
  static const auto of_one_rank = std::make_shared<Timeline>();
  return group_name.empty() ? of_one_rank : find_session(group_name)->timeline();
}

}  // namespace distca::ops
