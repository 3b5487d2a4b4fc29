#include <torch/library.h>
#include <torch/version.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "core/head_parts.h"
#include "keeping.h"
#include "layout_tensor.h"
#include "session.h"
#include "transport/registry.h"
#include "version.h"

// Every operator of distca. `layout` (int64, CPU) and `rows` (int32, the attention's device) are
// one rank's share of a plan, made by distca::layout and distca::unpack_rows; `group_name` names a
// c10d process group opened by distca::open_session, or is empty for a layout of one rank.
//
// q [tokens, heads_q, head_dim], k [context rows + tokens, heads_kv, head_dim], v [context rows +
// tokens, heads_kv, head_dim_v], out [tokens, heads_q, head_dim_v], lse [tokens, heads_q].
TORCH_LIBRARY(distca, m) {
  // A CUDA graph would repeat an operator with the plan of one step. Inductor excludes operators
  // with this tag from its graphs.
  const std::vector<at::Tag> of_one_step{at::Tag::cudagraph_unsafe};

  // The whole of core attention, forward and backward. `kept` [elements], of q's dtype, holds q, k
  // and v of visiting rows for the backward pass: it has room for so many query and key rows,
  // at least those that kept_rows says of the layout, or none where no backward pass follows.
  // `caller` is the number of the calling module, -1 if unknown. Ranks compare it.
  m.def(
      "core_attention(Tensor q, Tensor k, Tensor v, Tensor layout, Tensor rows, "
      "float softmax_scale, str group_name, SymInt num_kept_queries=0, SymInt num_kept_keys=0, "
      "int caller=-1, float softcap=0) "
      "-> (Tensor out, Tensor lse, Tensor kept)",
      of_one_step);
  m.def(
      "core_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, Tensor layout, Tensor rows, float softmax_scale, str group_name, "
      "Tensor? kept=None, int caller=-1, Tensor? grad_lse=None, float softcap=0) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
      of_one_step);

  // Its dispatch alone, to be timed.
  m.def("exchange(Tensor q, Tensor k, Tensor v, Tensor layout, Tensor rows, str group_name) -> ()",
        of_one_step);

  // Attention of one task list, without communication; differentiable.
  m.def(
      "attend(Tensor q, Tensor k, Tensor v, Tensor layout, Tensor rows, float softmax_scale, "
      "str tasks) -> (Tensor out, Tensor lse)",
      of_one_step);
  m.def(
      "attend_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
      "Tensor layout, Tensor rows, float softmax_scale, str tasks) "
      "-> (Tensor grad_q, Tensor grad_k, Tensor grad_v)",
      of_one_step);

  // Returns every rank's `words`, int64 [any length], by rank. Collective, on the planning group.
  m.def("gather(Tensor words, str group_name, int step) -> Tensor[]");
  // Returns the calls that ranks last agreed on under a plan for this window, int64 [num_calls, 7].
  // They are to be announced with plan `step`.
  m.def("agreed_calls(str group_name, int step, int window_left, int window_right) -> Tensor calls",
        [](const std::string& group_name, int64_t step, int64_t left, int64_t right) {
          return distca::ops::find_session(group_name)->agreed_calls(step, {left, right});
        });
  // Compares a plan with other ranks, and announces these calls under it (see session.h).
  // Collective, on the planning group.
  m.def("agree_on_plan(Tensor layout, Tensor calls, str group_name) -> ()",
        [](const at::Tensor& layout, const at::Tensor& calls, const std::string& group_name) {
          distca::ops::find_session(group_name)->agree_on_plan(layout, calls);
        });

  // Planning: pieces int64 [num_pieces, 4] (rank, document, start, length) of all ranks, in row
  // order within each rank, or 5 with the number of their first tokens that are context: keys
  // without queries, the first positions of a document; bytes of a (query, key) row that
  // travel for a layer, that a server holds of it (by default as many), and that its inputs take,
  // of which a server may keep kept_cap_bytes for the backward pass, if keeping them saves at
  // least kept_gain of the predicted seconds of a layer; servers float64 [num_ranks, 3]
  // (speed, memory cap in bytes, seconds by which a layer's other work takes longer than on the
  // fastest rank), or empty: all of speed 1 without a cap; links float64 [12] (ranks
  // of a node; bytes per second of a rank within a node, and between nodes; seconds of transfers
  // that other work hides, over the mean seconds of attention; part of a rank's transfers that
  // travels while no visiting task runs; seconds that transfers wait for other traffic, forward and
  // backward; more seconds of transfers that other work hides, in both passes together; seconds of
  // a layer's other work minus those of other traffic on the links, forward and backward; part of
  // a layer's seconds by which it takes longer if any rows move, and seconds of its other work);
  // loads float64 [num_ranks, 9]
  // (seconds_home, seconds, bytes_out, bytes_in, node_bytes_out, node_bytes_in, held_bytes,
  // seconds_visiting, kept_bytes).
  m.def(
      "plan(Tensor pieces, int num_ranks, int window_left, int window_right, Tensor cost, "
      "int[] row_bytes, Tensor servers, Tensor links, float tolerance, int rounds=1, "
      "float kept_cap_bytes=0, int[]? held_bytes=None, int[]? kept_bytes=None, "
      "float kept_gain=0) "
      "-> (Tensor plan, Tensor loads)");
  // The predicted seconds of a layer, forward and backward, under a plan with these loads. They
  // include what moving rows costs even if other work hides the transfers.
  m.def("layer_seconds(Tensor loads, Tensor servers, Tensor links) -> float");
  // A plan of given tasks, int64 [num_tasks, 4] (document, q_begin, q_end, server), or 5 with
  // whether the server keeps inputs. This must be equal for all visiting tasks of a document on a
  // server, and is ignored for home tasks.
  m.def(
      "plan_of_tasks(Tensor pieces, Tensor tasks, int num_ranks, int window_left, "
      "int window_right) -> Tensor plan");
  // by_peer_memory: rows go by peer memory, so that results come home without this rank's stream.
  // ranks_per_node: as in open_session. num_parts: the number of parts of heads in which rows
  // travel, if the transport and the number of heads allow it. early_part: see make_layout.
  // batch: the step of the first plan for the same documents, under which layers are counted; None:
  // this one's.
  m.def(
      "layout(Tensor pieces, Tensor plan, int rank, int step, str device_type, "
      "bool deterministic=False, int[] held_bytes=[], float? round_bytes=None, "
      "bool by_peer_memory=False, int? batch=None, int ranks_per_node=0, int num_parts=1, "
      "float early_part=0.5) "
      "-> (Tensor layout, Tensor packed_rows)");
  // Returns how many parts of query heads, and how many parts of key heads, a call has if num_parts
  // of its layout is `most`.
  m.def("head_parts(int heads_q, int heads_kv, int most) -> int[]",
        [](int64_t heads_q, int64_t heads_kv, int64_t most) {
          const auto [count, key_count] = distca::divide_heads(heads_q, heads_kv, most);
          return std::vector<int64_t>{count, key_count};
        });
  // `rows` from their packed form, on its device.
  m.def("unpack_rows(Tensor layout, Tensor packed_rows) -> Tensor rows", of_one_step);
  // Visiting (query rows, key rows) whose inputs this rank keeps for the backward pass.
  m.def("kept_rows(Tensor layout) -> int[]", distca::ops::kept_rows);
  // Peak bytes of kept inputs, and peak number of core_attention calls whose backward pass is still
  // to come, in this process since the previous take_kept_peak().
  m.def("take_kept_peak() -> int[]", [] {
    const auto [num_bytes, num_calls] = distca::ops::take_kept_peak();
    return std::vector<int64_t>{num_bytes, num_calls};
  });

  // Sessions: see session.h. ranks_per_node: rows between the ranks of node_group, which is this
  // rank's node, travel by another transport than rows between nodes; 0: all use one transport.
  // servers_group: rank 0 and the servers, empty on all other ranks; None: no rank is a server.
  m.def(
      "open_session(str data_group, str control_group, str planning_group, str configuration, "
      "float timeout_s, str transport=\"process_group\", int? peer_device=None, "
      "int peer_memory_bytes=0, str node_group=\"\", int ranks_per_node=0, "
      "str? servers_group=None) -> ()",
      [](const std::string& data, const std::string& control, const std::string& planning,
         const std::string& configuration, double timeout_s, const std::string& transport,
         std::optional<int64_t> peer_device, int64_t peer_memory_bytes,
         const std::string& node_group, int64_t ranks_per_node,
         const std::optional<std::string>& servers_group) {
        distca::ops::open_session({data, control, planning, node_group, servers_group},
                                  configuration, timeout_s, transport,
                                  {peer_device, peer_memory_bytes, ranks_per_node});
      });
  // Returns the names that open_session accepts as `transport`.
  m.def("transports() -> str[]", [] { return distca::transport::transports(); });
  // Whether this build can write to other ranks' memory.
  m.def("has_peer_transport() -> bool", [] { return distca::transport::has_peer_transport(); });
  // Bytes of this rank that others of the group write to; 0 where they do not.
  m.def("peer_memory_bytes(str group_name) -> int", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->peer_memory_bytes();
  });
  // These bytes, uint8, for tests: see session.h.
  m.def("peer_memory(str group_name) -> Tensor", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->peer_memory();
  });
  m.def("close_session(str group_name) -> ()",
        [](const std::string& group_name) { distca::ops::close_session(group_name); });
  // Leaves the group. Waits for plans end at once, and the other ranks learn `how` this one left,
  // as in "has closed its session".
  m.def("leave_session(str group_name, str how) -> ()",
        [](const std::string& group_name, const std::string& how) {
          const auto session = distca::ops::find_session(group_name);
          session->planning().stop();
          if (session->servers() != nullptr) session->servers()->end();
          session->failures().leave(how);
        });
  // Servers, which run no model: see servers.h, also for notices. tell_servers: before a
  // collective on the planning group. serve_call: computes the tasks of a call for which a notice
  // came, under its plan; returns the kept inputs. agree_on_refusal: for a call that was refused.
  m.def("tell_servers(str group_name, int kind, int step, int[] details) -> ()",
        [](const std::string& group_name, int64_t kind, int64_t step, at::IntArrayRef details) {
          distca::ops::Notice notice{.kind = kind, .step = step};
          TORCH_CHECK_VALUE(details.size() <= notice.details.size(), "details has ", details.size(),
                            " words; expected at most ", notice.details.size());
          std::ranges::copy(details, notice.details.begin());
          distca::ops::find_session(group_name)->notices().tell(notice);
        });
  m.def("next_notice(str group_name) -> int[]", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->notices().next().words();
  });
  m.def(
      "serve_call(int[] notice, Tensor layout, Tensor rows, Tensor? kept, str group_name) "
      "-> Tensor kept",
      of_one_step);
  m.def("agree_on_refusal(str group_name, int step) -> ()",
        [](const std::string& group_name, int64_t step) {
          distca::ops::find_session(group_name)->agree_on_refusal(step);
        });
  // Returns whether abandoned exchanges may still be under way. Destroying their process groups
  // would wait for them.
  m.def("may_be_busy(str group_name) -> bool", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->failures().may_be_busy();
  });
  // Keeps process groups until the process ends.
  m.def("keep_groups(str[] names) -> ()", [](const std::vector<std::string>& names) {
    static auto* kept = new std::vector<c10::intrusive_ptr<c10d::ProcessGroup>>;
    for (const auto& name : names) kept->push_back(c10d::resolve_process_group(name));
  });
  // Returns whether any rank has another batch. Collective, on the planning group.
  m.def("any_has_batch(str group_name, bool has_batch) -> bool",
        [](const std::string& group_name, bool has_batch) {
          const auto session = distca::ops::find_session(group_name);
          const auto all = session->planning().gather(has_batch ? "1" : "0", {"join", "", -1, -1},
                                                      "distca.join, before the next batch");
          return std::find(all.begin(), all.end(), "1") != all.end();
        });
  // Runs Python's pending signal handlers. Implemented in Python.
  m.def("handle_signals() -> ()");
  m.def("attention_shape(str group_name) -> int[]", [](const std::string& group_name) {
    const auto shape = distca::ops::find_session(group_name)->attention_shape();
    return std::vector<int64_t>(shape.begin(), shape.end());
  });
  // Times of one step's attention: see timeline.h. attention_times: microseconds of attention and,
  // of these, of waiting for other ranks; empty while they are not known.
  m.def("watch_step(str group_name, int step) -> ()",
        [](const std::string& group_name, int64_t step) {
          distca::ops::timeline_of(group_name)->watch(step);
        });
  m.def("attention_times(str group_name) -> int[]", [](const std::string& group_name) {
    const auto totals = distca::ops::timeline_of(group_name)->finish();
    return totals ? std::vector<int64_t>{totals->attention_us, totals->waiting_us}
                  : std::vector<int64_t>{};
  });
  // Lets the current stream wait until the results of the latest forward call that moved rows are
  // home.
  m.def("await_results(str group_name) -> ()", [](const std::string& group_name) {
    distca::ops::find_session(group_name)->await_results();
  });
  // Timed exchanges by process group that have ended on the device since the last call, int64
  // [num_exchanges, 4]: whether in the backward pass, whether combine, bytes, nanoseconds.
  m.def("take_exchange_times(str group_name) -> Tensor", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->take_exchange_times();
  });
  m.def("take_task_times(str group_name) -> Tensor", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->times()->tasks.take();
  });
  m.def("take_gap_times(str group_name) -> Tensor", [](const std::string& group_name) {
    return distca::ops::find_session(group_name)->times()->gaps.take();
  });
  // Lets the current stream wait until rows of the session's latest call are on their way.
  m.def("await_dispatch(str group_name) -> ()", [](const std::string& group_name) {
    distca::ops::find_session(group_name)->await_dispatch();
  });
  m.def("spans(str group_name) -> (str[] phases, Tensor times)", [](const std::string& group_name) {
    return distca::ops::timeline_of(group_name)->finished();
  });
  // Throws DistBackendError if a rank of the group has failed, has left or is gone. `doing` says
  // what this rank waits for elsewhere.
  m.def("check_ranks(str group_name, str doing) -> ()",
        [](const std::string& group_name, const std::string& doing) {
          auto& failures = distca::ops::find_session(group_name)->failures();
          const char* channel = distca::transport::kLayers;
          if (failures.find_departed(channel).empty() && !failures.alarmed() &&
              !failures.has_dead_peer()) {
            return;
          }
          const std::string cause =
              failures.diagnose(channel, "given up, because a rank of the group has failed", doing);
          TORCH_CHECK_WITH(DistBackendError, false, "distca: ", doing, ": ", cause);
        });
  m.def("announce_failure(str group_name, str message) -> ()",
        [](const std::string& group_name, const std::string& message) {
          distca::ops::find_session(group_name)->failures().announce(message);
        });
  // Sets the name of a module, by number, for errors. Numbers are equal on all ranks.
  m.def("name_caller(int caller, str name) -> ()", [](int64_t caller, const std::string& name) {
    distca::transport::name_caller(caller, name);
  });
  // Sets whether training waits for the plan that its background thread gathers.
  m.def("await_plan(str group_name, bool is_awaited) -> ()",
        [](const std::string& group_name, bool is_awaited) {
          distca::ops::find_session(group_name)->planning().set_awaited(is_awaited);
        });
  m.def("version() -> int", [] { return distca::ops::kVersion; });
}

TORCH_LIBRARY_IMPL(distca, CPU, m) {
  m.impl("unpack_rows", distca::ops::unpack_rows);
}

TORCH_LIBRARY_IMPL(distca, CUDA, m) {
  m.impl("unpack_rows", distca::ops::unpack_rows);
}

// Read from the file before it is loaded: a library built for another torch must not be.
extern "C" __attribute__((visibility("default"))) const char distca_built_for[] =
    "distca-built-for-torch:" TORCH_VERSION ":end";
