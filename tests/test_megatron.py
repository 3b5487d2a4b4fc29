"""A small GPT of Megatron-Core with our attention has the results of Megatron's own."""

import pytest

pytest.importorskip(
    "megatron.core", reason="needs megatron-core (make test-megatron), and this environment has none"
)

import megatron_model as mm  # noqa: E402
from megatron_model import Way  # noqa: E402

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
