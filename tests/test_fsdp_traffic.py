"""On slow links, the planner leaves room for FSDP2's traffic."""

import weakref
from unittest import mock

import parallel_training
import pytest
import torch
from test_waits import SLOW, reports_of_steps
from torch.distributed import _composable_state
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distca
from distca import _torch_private
from distca.planning import solver
from distca.planning.cluster import Cluster, other_work
from distca.planning.cost import AttentionShape, cost_tensor, flops_per_second
from distca.planning.solver import Problem, solve
from distca.ranks import fsdp_traffic
from distca.ranks.fsdp_traffic import UNKNOWN, FsdpTraffic, ModelTraffic, common_traffic
from distca.ranks.peers import Way


def traffic_of_a_model(rank: int, world_size: int, reduce_dtype) -> tuple[list[int], int]:
    """Return the words of a Llama with two blocks, and the number of parameters of a block."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = parallel_training.build(distca.core_attention)
    num_params = sum(each.numel() for each in model.blocks[0].parameters())
    for block in model.blocks:
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    with mock.patch.object(fsdp_traffic, "sharded_layers", lambda: layers_of(model)):
        return ModelTraffic().words(has_run=True), num_params


def layers_of(model: torch.nn.Module) -> list[tuple[int, int, int, int]]:
    """Search only this model, because other tests leave models in the processes."""
    states = _composable_state._module_state_mapping
    own = {module: states[module] for module in model.modules() if module in states}
    own = weakref.WeakKeyDictionary(own)
    with mock.patch.object(_composable_state, "_module_state_mapping", own):
        return _torch_private.sharded_layers()


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_the_traffic_of_a_block(ranks, reduce_dtype):
    """The root gathers embedding and head, so they do not count as layers."""
    for words, num_params in ranks(2).run(traffic_of_a_model, reduce_dtype):
        reduced_bytes = num_params * (2 if reduce_dtype is None else 4)
        assert words == [num_params, 2 * num_params, reduced_bytes, 2]


def test_traffic_is_unknown_without_a_model_that_has_run():
    layers = [(10, 20, 40, 2), (12, 24, 48, 2), (30, 60, 120, 2)]
    traffic = ModelTraffic()
    with mock.patch.object(fsdp_traffic, "sharded_layers", lambda: layers):
        assert traffic.words(has_run=False) == UNKNOWN
        assert traffic.words(has_run=True) == [12, 24, 48, 2]
    with mock.patch.object(fsdp_traffic, "sharded_layers", list):
        assert ModelTraffic().words(has_run=True) == UNKNOWN


def test_ranks_must_agree_on_traffic():
    words = torch.tensor([[12, 24, 48, 2]] * 2)
    assert common_traffic(words) == FsdpTraffic(12, 24, 48, 2)
    words[1, 0] = 13
    assert common_traffic(words) is None
    assert common_traffic(torch.tensor([UNKNOWN] * 2)) is None


def test_room_on_links():
    """Linear work takes 2 s forward and 4 s backward, at 6 FLOP/s."""
    traffic = FsdpTraffic(num_params=3, gathered_bytes=80, reduced_bytes=160, num_ranks=4)
    one_node = Cluster(4, link_bytes_per_second=100.0)
    work = other_work(one_node, traffic, 2.0, 6.0)
    assert work["link_room"] == pytest.approx((2 - 0.6, 4 - 0.6 - 1.2))
    assert work["other_seconds"] == pytest.approx(6)
    # Half of what a node of two ranks gets comes from the other node, through both ranks' links.
    link = {"link_bytes_per_second": 1e9, "node_link_bytes_per_second": 10.0}
    two_nodes = Cluster(4, ranks_per_node=2, **link)
    room = other_work(two_nodes, traffic, 2.0, 6.0)["link_room"]
    assert room == pytest.approx((2 - 2, 4 - 2 - 4))


def test_small_gains_move_nothing(monkeypatch):
    """Moving rows makes a layer longer by a part of its seconds, FSDP's linear work included."""
    monkeypatch.setattr(solver, "DEVICES_OF_MOVING_PART", ("cpu",))
    shape, options = AttentionShape(), distca.Options(link_gb_per_s=1e6)
    pieces = torch.tensor([[0, 0, 0, 4000, 0], [1, 1, 0, 3000, 0], [1, 2, 0, 1000, 0]])
    cost = cost_tensor(options, shape, "cpu")
    home = solve(Problem(0, 2, (-1, 0), "cpu", 0, traffic=None), pieces, options, shape).report
    gain = max(home.seconds_before) - max(home.seconds_after)
    linear = gain * flops_per_second(cost, shape) / (3 * 2 * 4000)  # parameters

    def moves(way: Way, gain_over_linear: float) -> bool:
        traffic = FsdpTraffic(int(linear / gain_over_linear), 0, 0, 2)
        problem = Problem(0, 2, (-1, 0), "cpu", 0, traffic=traffic, way=way)
        return any(solve(problem, pieces, options, shape).report.bytes_out)

    by_group, by_peer_memory = Way(), Way(device=0)
    assert moves(by_group, 0.04) and not moves(by_group, 0.015)
    assert moves(by_peer_memory, 0.015) and not moves(by_peer_memory, 0.007)


def test_linear_layers_do_not_see_context_rows():
    """Rank 1 has 100 tokens too, behind the keys of 50 others."""
    traffic = FsdpTraffic(num_params=10**6, gathered_bytes=0, reduced_bytes=0, num_ranks=2)
    problem = Problem(0, 2, (-1, 0), "cpu", 0, traffic=traffic)
    rooms = [
        solve(
            problem,
            torch.tensor([[0, 0, 0, 100, 0], [1, 1, 0, 100 + context, context]]),
            distca.Options(),
            AttentionShape(),
        ).report.link_room_ms
        for context in (0, 50)
    ]
    assert rooms[0] == rooms[1] and rooms[0][0] > 0


def test_speed_of_the_cost():
    shape = AttentionShape(4, 2, 32)
    cost = cost_tensor(distca.Options(attention_tflops=0.25), shape, "cpu")
    assert flops_per_second(cost, shape) == pytest.approx(0.25e12)
    # A table with entries for 64 and 128 rows, and 128 and 256 keys.
    num_pairs = 128 * 256 - 128 * 127 / 2
    table = [64, 64, 0.1, 0.0, 2, 2, 64, 128, 128, 256, 0.1, 0.2, 0.3, 2.0]
    expected = num_pairs * sum(shape.pair_flops()) / 2.0
    assert flops_per_second(torch.tensor(table), shape) == pytest.approx(expected)


def reports_of(rank: int, world_size: int, words: list[int], options: dict) -> list:
    """Return the reports of plans before and after the first attention."""
    distca.close()
    distca.init(options=distca.Options(**SLOW, **options))
    with mock.patch.object(ModelTraffic, "words", lambda _, has_run: words if has_run else UNKNOWN):
        reports = reports_of_steps(rank, world_size, 2)
    distca.close()
    return reports


# A layer has 850 tokens on a rank, 0.001 TFLOP/s and 1 GB/s.
LITTLE = [10**6, 10**6, 10**6, 2]
MUCH = [10**6, 10**10, 10**10, 2]


@pytest.mark.parametrize(
    "words, options, moves, num_rooms",
    [
        (LITTLE, {}, True, 2),
        (MUCH, {}, False, 2),
        (UNKNOWN, {}, True, 0),
        (MUCH, {"deterministic": True}, True, 0),
    ],
    ids=["little", "much", "none", "deterministic"],
)
def test_plans_move_nothing_that_would_delay_fsdp(ranks, words, options, moves, num_rooms):
    first, second = ranks(2).run(reports_of, words, options)
    for one, other in zip(first, second, strict=True):
        assert one.link_room_ms == other.link_room_ms and one.bytes_out == other.bytes_out
    assert sum(first[0].bytes_out) > 0 and first[0].link_room_ms == []
    assert (sum(first[1].bytes_out) > 0) == moves and len(first[1].link_room_ms) == num_rooms
