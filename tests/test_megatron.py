"""A small GPT of Megatron-Core with our attention has the results of Megatron's own."""

import dataclasses
import os
import re
import unittest.mock
from pathlib import Path

import pytest
import torch
from programs import run_ranks

pytest.importorskip(
    "megatron.core",
    reason="needs megatron-core (make test-megatron), and this environment has none",
)

import megatron_model as mm  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.transformer.enums import AttnMaskType  # noqa: E402
from megatron.core.transformer.spec_utils import ModuleSpec  # noqa: E402
from megatron_model import Way  # noqa: E402
from recorded import recorded_plans  # noqa: E402

import distca  # noqa: E402
import distca.integrations.megatron as integration  # noqa: E402
from distca.integrations import megatron_batches  # noqa: E402

ROOT = Path(__file__).parent.parent

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def truth(own_ranks):
    """Return truth(way, num_packs): loss and gradients of one process, document by document."""
    known = {}

    def get(way: Way, num_packs: int):
        key = (way.model, num_packs)
        if key not in known:
            (known[key],) = own_ranks(1).run(_true_step, way, num_packs)
        return known[key]

    return get


def _true_step(rank: int, world_size: int, way: Way, num_packs: int):
    return mm.true_step(way, num_packs)


WAYS = {
    "data parallel 1": (1, Way()),
    "data parallel 2": (2, Way()),
    "data parallel 4": (4, Way()),
    "windows": (2, Way("windows")),
    "scaled scores": (2, Way("scaled")),
    "sinks": (2, Way("sinks")),
    "off by one": (2, Way("off by one")),
    "multi-latent attention": (2, Way("latent")),
    "padded documents": (2, Way("windows", is_padded=True)),
    "recomputed attention": (2, Way(recomputed="core_attn")),
    "recomputed layers": (2, Way("windows", recomputed="full")),
    "pipeline 2": (2, Way(pipeline_parallel=2)),
    "pipeline 2, data parallel 2": (4, Way(pipeline_parallel=2)),
    "pipeline 2, recomputed layers": (4, Way(pipeline_parallel=2, recomputed="full")),
    "pipeline 2, recomputed attention": (4, Way(pipeline_parallel=2, recomputed="core_attn")),
    # On gloo, Megatron mixes up messages of chunks whose micro-batches differ in length.
    "interleaved pipeline 2": (4, Way(pipeline_parallel=2, chunks=2, num_rows=192)),
    "documents across 2": (2, Way("windows", crosses_ranks=True)),
    "documents across 4": (4, Way(crosses_ranks=True)),
    "documents across 2, recomputed layers": (2, Way(crosses_ranks=True, recomputed="full")),
    "documents across 2, pipeline 2": (4, Way(crosses_ranks=True, pipeline_parallel=2)),
    "tensor parallel 2": (4, Way(tensor_parallel=2)),
    "tensor and sequence parallel 2": (
        4,
        Way(tensor_parallel=2, sequence_parallel=True, is_padded=True),
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_packed_documents_equal_documents_alone(own_ranks, truth, name):
    world_size, way = WAYS[name]
    num_packs = world_size // (way.tensor_parallel * way.pipeline_parallel)
    for result in own_ranks(world_size).run(mm.balanced_error, way, truth(way, num_packs)):
        assert result.worst_error <= TOLERANCE
        assert (result.bytes_moved > 0) == (num_packs > 1), "the case must move rows"
        assert result.num_plans == 2, "one for each micro-batch"
        # Forward passes are balanced, not only what is recomputed.
        assert result.num_without_gradients == (2 if way.recomputed else 0)


def _installed_error(rank: int, world_size: int, way: Way, truth) -> mm.Result:
    return mm.balanced_error(rank, world_size, way, truth, installed=True)


@pytest.mark.parametrize("model", ["gpt", "latent"])
def test_installed_attention_needs_no_spec(own_ranks, truth, model):
    way = Way(model)
    for result in own_ranks(2).run(_installed_error, way, truth(way, 2)):
        assert result.worst_error <= TOLERANCE and result.bytes_moved > 0


def test_the_comparison_notices_a_lost_boundary(own_ranks, truth):
    for result in own_ranks(2).run(_error_without_a_boundary, Way(), truth(Way(), 2)):
        assert result.worst_error > 100 * TOLERANCE


def _error_without_a_boundary(rank: int, world_size: int, way: Way, truth) -> mm.Result:
    def merged(packed_seq_params, which):
        name, bounds = stock(packed_seq_params, which)
        return name, torch.cat([bounds[:1], bounds[2:]])  # a new tensor for each layer

    stock = integration.tensor_in
    with unittest.mock.patch.object(integration, "tensor_in", merged):
        return mm.balanced_error(rank, world_size, way, truth)


def _kinds(rank: int, world_size: int) -> list[str]:
    """Return the classes of core attention before, after and inside `install`."""
    with mm.parallel(Way()):
        kinds = [type(layer_of(Way())).__name__]
        undo = integration.install()
        kinds.append(type(layer_of(Way())).__name__)
        spec = ModuleSpec(mm.DotProductAttention)
        kinds.append(type(layer_of(Way(), spec)).__name__)
        undo()
        return [*kinds, type(layer_of(Way())).__name__]


def layer_of(way: Way, core_attention=None):
    """Return the core attention of a model's first layer."""
    return mm.build(way, core_attention)[0].decoder.layers[0].self_attention.core_attention


def test_install_replaces_megatrons_class_until_undone(own_ranks):
    stock, ours = "DotProductAttention", "BalancedAttention"
    assert own_ranks(1).run(_kinds) == [[stock, ours, ours, stock]]


def _unpacked(rank: int, world_size: int) -> list[float]:
    """Return errors of logits of a batch of two rows, and of attention without a causal mask."""
    with mm.parallel(Way()), mm.recorded_plans() as plans:
        ids = torch.arange(40).view(2, 20)
        positions = torch.arange(20).expand(2, 20)
        kinds = (mm.MEGATRONS, integration.BalancedAttention)
        ours, stock = (mm.build(Way(), kind)[0](ids, positions, None) for kind in kinds)
        errors = [mm.relative_error(ours, stock)]
        for settings in (
            {"attention_type": "cross", "attn_mask_type": AttnMaskType.causal},
            {"attention_type": "self", "attn_mask_type": AttnMaskType.no_mask},
        ):
            layer = integration.BalancedAttention(mm.config_of(Way()), 1, **settings)
            with pytest.raises(AssertionError, match="Packed sequence is not supported by Dot"):
                attend(layer)
        assert not plans
        return errors


def attend(layer, **changes):
    """Attend to 12 rows of two documents, with changed arguments."""
    torch.manual_seed(0)
    q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    bounds = torch.tensor([0, 5, 12], dtype=torch.int32)
    both = {"cu_seqlens_q": bounds, "cu_seqlens_kv": bounds}
    params = changes.pop("packed_seq_params", {})
    packed = None if params is None else PackedSeqParams("thd", **{**both, **params})
    return layer(q, k, v, **{"attention_mask": None, "packed_seq_params": packed, **changes})


def test_what_is_not_packed_is_left_to_megatron(own_ranks):
    for errors in own_ranks(2).run(_unpacked):
        assert max(errors) == 0


def _evaluated(rank: int, world_size: int, together: bool) -> tuple[float, int]:
    """Return the error of the loss and the number of plans; ranks evaluate unequal numbers of
    micro-batches unless they do it together."""
    with mm.parallel(Way()), mm.recorded_plans() as plans:
        group = parallel_state.get_data_parallel_group()
        distca.init(group, options=distca.Options(balance_no_grad=together))
        model, stock = (
            mm.build(Way(), kind)[0].eval()
            for kind in (integration.BalancedAttention, mm.MEGATRONS)
        )
        worst = 0.0
        for micro_batch in range(1 if together else 1 + rank):
            with torch.no_grad():
                loss = mm.Packed.of(rank, micro_batch, Way()).loss(model)
                truth = mm.loss_alone(stock, rank, micro_batch, Way())
            worst = max(worst, mm.relative_error(loss, truth))
        return worst, len(plans)


@pytest.mark.parametrize("together", [False, True])
def test_evaluation_is_balanced_on_request_only(own_ranks, together):
    for error, num_plans in own_ranks(2).run(_evaluated, together):
        assert error <= TOLERANCE and num_plans == together


def _planned_ahead(rank: int, world_size: int, way: Way) -> tuple[float, list[bool]]:
    """Train two steps, the second one planned ahead. Return its largest error against the first,
    which has the same documents, and which plans were made ahead."""
    with mm.parallel(way), recorded_plans() as are_ahead:
        chunks = mm.build(way, integration.BalancedAttention)
        dp_rank = parallel_state.get_data_parallel_rank()
        batches = [[mm.Packed.of(dp_rank, i, way) for i in range(2)] for _ in range(2)]
        first = mm.step(chunks, batches[0])
        first = first[0], {name: each.clone() for name, each in first[1].items()}
        for each in batches[1]:
            megatron_batches.plan_ahead(each.packed_seq_params)
        return mm.worst_error(mm.step(chunks, batches[1]), first), are_ahead


def test_micro_batches_planned_ahead(own_ranks):
    for error, are_ahead in own_ranks(2).run(_planned_ahead, Way("windows")):
        assert error <= TOLERANCE
        assert are_ahead == [False] * 2 + [True] * 4, "the second step plans both windows ahead"


def _boundaries_shared_in_flight(rank: int, world_size: int) -> float:
    """Return the error of a step in which one object serves several micro-batches in flight."""
    way = Way(pipeline_parallel=2, recomputed="full", num_rows=192)
    with mm.parallel(way):
        chunks = mm.build(way, integration.BalancedAttention)
        dp_rank = parallel_state.get_data_parallel_rank()
        own = [mm.Packed.of(dp_rank, 0, way) for _ in range(4)]
        shared = [dataclasses.replace(own[0]) for _ in own]
        truth = mm.step(chunks, own)
        truth = truth[0], {name: each.clone() for name, each in truth[1].items()}
        return mm.worst_error(mm.step(chunks, shared), truth)


def test_micro_batches_in_flight_may_share_boundaries(own_ranks):
    assert max(own_ranks(4).run(_boundaries_shared_in_flight)) <= TOLERANCE


def _rows_after_the_documents(rank: int, world_size: int) -> bool:
    with mm.parallel(Way()):
        layer = integration.BalancedAttention(mm.config_of(Way()), 1, AttnMaskType.causal, "self")
        whole, part = (
            attend(layer, packed_seq_params=dict.fromkeys(["cu_seqlens_q", "cu_seqlens_kv"], each))
            for each in (torch.tensor([0, 5, 12]), torch.tensor([0, 5, 9, 9]))
        )
        return torch.allclose(part[:9], whole[:9], atol=1e-6) and not part[9:].any()


def test_rows_after_the_documents_are_zero(own_ranks):
    assert own_ranks(1).run(_rows_after_the_documents) == [True]


class StandIn(torch.nn.Module):
    """Takes the arguments of TEDotProductAttention, and returns those of a call."""

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        k_channels=None,
        v_channels=None,
        num_splits=None,
        cp_comm_type="p2p",
        pg_collection=None,
    ) -> None:
        super().__init__()
        self.config, self.channels = config, (k_channels, v_channels)

    def forward(
        self,
        query,
        key,
        value,
        attention_mask,
        attn_mask_type,
        attention_bias=None,
        packed_seq_params=None,
        num_splits=None,
    ):
        return attn_mask_type, attention_bias, packed_seq_params, num_splits


def _on_transformer_engine(rank: int, world_size: int) -> tuple:
    """Return what a stand-in for Transformer Engine's class gets, and the error of a packed call
    whose values are padded."""
    kind = type("Balanced", (integration._Balanced, StandIn), {})
    with mm.parallel(Way()):
        config = mm.config_of(Way())
        channels = {"k_channels": 8, "v_channels": 6, "softmax_scale": None}
        settings = {"attn_mask_type": AttnMaskType.causal, "attention_type": "self"}
        layer = kind(config=config, layer_number=1, cp_comm_type=None, **settings, **channels)
        plain = integration.BalancedAttention(config, 1, **settings)
        left = attend(layer, packed_seq_params=None, num_splits=1)
        error = mm.relative_error(attend(layer), attend(plain)[..., :6])
        return layer.channels, left, error


def test_transformer_engines_arguments_reach_it(own_ranks):
    ((channels, left, error),) = own_ranks(1).run(_on_transformer_engine)
    assert channels == (8, 6) and left == (AttnMaskType.causal, None, None, 1)
    assert error <= 1e-6


OTHER = torch.tensor([0, 6, 12])
# Changed settings of the configuration, changed arguments, and what the error says.
REFUSED = {
    "context parallel": (
        {"context_parallel_size": 2},
        {},
        "context_parallel_size is 2; .* documents that cross ranks replace it",
    ),
    "dropout": ({"attention_dropout": 0.1}, {}, "attention_dropout is 0.1; expected 0.0"),
    "mask": ({}, {"attention_mask": OTHER}, r"attention_mask has shape \[3\]"),
    "bias": ({}, {"attention_bias": OTHER}, r"attention_bias has shape \[3\]"),
    "window": ({"window_size": (7, 7)}, {}, r"window_size is \(7, 7\)"),
    "deterministic": ({"deterministic_mode": True}, {}, "deterministic_mode is True"),
    "keys": ({}, {"cu_seqlens_kv": OTHER}, "differs from cu_seqlens_q"),
    "padded keys": ({}, {"cu_seqlens_kv_padded": OTHER}, "differs from cu_seqlens_q"),
    "no keys": ({}, {"cu_seqlens_kv": None}, "cu_seqlens_kv is None"),
    "decreasing": ({}, {"cu_seqlens_q": torch.tensor([0, 7, 3])}, "cu_seqlens_q: cu_seqlens is"),
    "too long": (
        {},
        dict.fromkeys(["cu_seqlens_q", "cu_seqlens_kv"], torch.tensor([0, 13])),
        "cu_seqlens_q ends at 13, but q has 12 rows",
    ),
    "dynamic context parallel": ({}, {"local_cp_size": 2}, "local_cp_size is 2"),
    **{name: ({name: True}, {}, f"{name} is True") for name in integration.UNSUPPORTED},
}


def _refusal(rank: int, world_size: int, name: str) -> str:
    settings, changes, _ = REFUSED[name]
    arguments = {key: changes[key] for key in changes if key.startswith("attention")}
    params = {key: changes[key] for key in changes if key not in arguments}
    with mm.parallel(Way()):
        config = mm.config_of(Way())
        vars(config).update(settings)  # some would want Transformer Engine
        try:
            layer = integration.BalancedAttention(config, 1, AttnMaskType.causal, "self")
            attend(layer, packed_seq_params=params, **arguments)
        except ValueError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_computed_is_refused(own_ranks, name):
    (message,) = own_ranks(1).run(_refusal, name)
    assert re.search(REFUSED[name][2], message)


def _one_rank_refuses(rank: int, world_size: int) -> str:
    with mm.parallel(Way()):
        layer = integration.BalancedAttention(mm.config_of(Way()), 1, AttnMaskType.causal, "self")
        attend(layer)
        try:
            attend(layer, packed_seq_params={"cu_seqlens_kv": OTHER} if rank else {})
        except (ValueError, RuntimeError) as error:
            return str(error)


def test_every_rank_hears_of_a_refusal(own_ranks):
    for message in own_ranks(2).run(_one_rank_refuses):
        assert "differs from cu_seqlens_q" in message


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import torch
import torch.distributed as dist
import megatron_model as mm

dist.init_process_group("gloo")
way = mm.Way()
with mm.parallel(way):
    chunks = mm.build(way, None)
    with mm.recorded_plans() as plans:
        mm.step(chunks, [mm.Packed.of(dist.get_rank(), 0, way)])
print("planned", len(plans), type(chunks[0].decoder.layers[0].self_attention.core_attention))
dist.destroy_process_group()
"""


def test_the_launcher_installs_it(tmp_path):
    script = tmp_path / "pretrain.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = run_ranks(["-m", "distca.run", "--megatron", script], 2, environment, tmp_path)
    assert result.returncode == 0, result.stderr[-3000:]
    line = "planned 1 <class 'distca.integrations.megatron.BalancedAttention'>"
    assert result.stdout.count(line) == 2
