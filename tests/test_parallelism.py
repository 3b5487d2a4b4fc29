"""Attention under tensor parallel, HSDP and FSDP2, and of documents that cross ranks."""

import parallel_training as training
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import distca
from distca.integrations.fsdp import gather_after_attention
from distca.ranks import groups

TOLERANCE = 1e-5


def relative_error(got: Tensor, truth: Tensor) -> float:
    return ((got - truth).norm() / truth.norm()).item()


def worst_error(loss: float, gradients: dict, truth: tuple[float, dict]) -> float:
    errors = [relative_error(gradients[name], truth[1][name]) for name in truth[1]]
    return max(abs(loss - truth[0]) / truth[0], *errors)


@pytest.fixture(scope="module")
def truth() -> tuple[float, dict]:
    return training.true_step()


@pytest.mark.parametrize("name", [n for n in training.WAYS if "bfloat16" not in n])
def test_every_parallelism_equals_one_process(ranks, truth, name):
    results = ranks(4).run(training.train_step, name)
    for result in results:
        assert worst_error(result.loss, result.gradients, truth) <= TOLERANCE
        assert result.bytes_moved > 0, "the case must move rows"


def test_mixed_precision_is_as_exact_as_without_distca(ranks, truth):
    in_bfloat16 = worst_error(*training.true_step(torch.bfloat16), truth)
    for result in ranks(4).run(training.train_step, "offload, bfloat16"):
        assert worst_error(result.loss, result.gradients, truth) <= 2 * in_bfloat16


@pytest.mark.parametrize("name", [n for n in training.WAYS if "tensor parallel" in n])
def test_tensor_parallel_ranks_have_one_plan(ranks, name):
    layouts: dict[int, list] = {}
    for result in ranks(4).run(training.train_step, name):
        layouts.setdefault(result.place, []).append(result.layout)
    assert len(layouts) == 2
    for first, second in layouts.values():
        assert first == second


def test_a_model_without_fsdp_is_refused():
    with pytest.raises(ValueError, match="model is 'Linear'; expected a model sharded by fully_"):
        gather_after_attention(torch.nn.Linear(1, 1))


def test_the_comparison_notices_a_lost_boundary_and_a_wrong_scale(truth, monkeypatch):
    gradients = {name: 1.001 * each for name, each in truth[1].items()}
    assert worst_error(truth[0], gradients, truth) > TOLERANCE
    first, *others = training.PACKS
    merged = [[first[0] + first[1], first[2]], *others]
    monkeypatch.setattr(training, "PACKS", merged)
    assert worst_error(*training.true_step(), truth) > 100 * TOLERANCE


LENGTHS = [40, 3, 21]
PLACED = {"heads": (Shard(1),), "replicated": (Replicate(),)}


def attend_dtensors(rank: int, world_size: int, placed: str, through: str) -> list[float]:
    """Attend to DTensors. Return errors of out, dq, dk, dv against torch's by document."""
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(sum(LENGTHS), heads, 8, dtype=torch.float64, generator=generator)
        for heads in (4, 2, 2)
    ]
    placements = PLACED[placed]
    leaves = [distribute_tensor(each, mesh, placements).requires_grad_() for each in whole]
    documents = distca.Documents([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    distca.init(dist.new_group([rank], use_local_synchronization=True))
    try:
        out = _attend(through, leaves, documents)
    finally:
        distca.close()
    assert isinstance(out, DTensor) and out.placements == placements
    out.full_tensor().square().sum().backward()
    truth_leaves = [each.requires_grad_() for each in whole]
    rows = zip(*(each.split(LENGTHS) for each in truth_leaves), strict=True)
    truth = torch.cat([_sdpa(*document) for document in rows])
    truth.square().sum().backward()
    pairs = [(out.full_tensor().detach(), truth.detach())]
    pairs += [(a.grad.full_tensor(), b.grad) for a, b in zip(leaves, truth_leaves, strict=True)]
    return [relative_error(*pair) for pair in pairs]


def _attend(through: str, leaves: list[DTensor], documents: distca.Documents) -> DTensor:
    with distca.documents(documents):
        if through == "core_attention":
            return distca.core_attention(*leaves, documents)
        if through == "compiled":
            attend = torch.compile(distca.core_attention, backend="eager", fullgraph=True)
            return attend(*leaves, documents)
        if through == "varlen_attention":
            bounds = documents.cu_seqlens
            longest = max(LENGTHS)
            return distca.varlen_attention(
                *leaves, bounds, bounds, longest, longest, window_size=(-1, 0)
            )
        heads_first = (each.transpose(0, 1).unsqueeze(0) for each in leaves)
        out = distca.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return out.squeeze(0).transpose(0, 1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    heads_first = (each.transpose(0, 1) for each in (q, k, v))
    out = F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
    return out.transpose(0, 1)


@pytest.mark.parametrize("through", ["core_attention", "varlen_attention", "sdpa", "compiled"])
@pytest.mark.parametrize("placed", PLACED)
def test_dtensors_in_and_out(ranks, placed, through):
    for errors in ranks(2).run(attend_dtensors, placed, through):
        assert max(errors) <= 1e-12


def refusals_of_dtensors(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    documents = distca.Documents([0, 8])
    q, k = torch.randn(8, 4, 8), torch.randn(8, 2, 8)

    def placed(tensor: Tensor, placement) -> DTensor:
        return DTensor.from_local(tensor, mesh, [placement])

    cases = [
        [placed(each, Shard(0)) for each in (q, k, k)],
        [placed(each, Partial()) for each in (q, k, k)],
        [placed(each, Shard(2)) for each in (q, k, k)],
        [placed(q, Shard(1)), placed(k, Replicate()), placed(k, Replicate())],
        [placed(q, Shard(1)), k, k],
        [distribute_tensor(each, mesh, [Shard(1)]) for each in (q, k[:, :1], k[:, :1])],
    ]
    messages = []
    for case in cases:
        with pytest.raises(ValueError) as refused:
            distca.core_attention(*case, documents)
        messages.append(str(refused.value))
    return messages


def test_dtensors_that_are_not_whole_heads_are_refused(ranks):
    expected = [
        "q has placement S(0)",
        "q has placement P(sum)",
        "q has placement S(2)",
        "k has placements (Replicate(),)",
        "k is a plain tensor beside DTensors",
        "k has 1 heads on 2 tensor parallel ranks",
    ]
    for messages in ranks(2).run(refusals_of_dtensors):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start)


def default_follows_init(rank: int, world_size: int) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    session = distca.init(mesh["dp"])
    checks = [
        session.group is mesh.get_group("dp"),
        distca.init() is session,
        distca.plan(distca.Documents([0, 5])).group_name == session.group_name,
        distca.plan(distca.Documents([0, 5]), group=mesh["dp"]).group_name == session.group_name,
    ]
    whole = distca.plan(distca.Documents([0, 5]), group=dist.group.WORLD)
    checks += [whole.group_name != session.group_name, distca.init() is session]
    with distca.documents(distca.Documents([0, 5]), group=mesh["dp"]) as packed:
        checks.append(packed._plans[packed.plan_key((-1, 0))].group_name == session.group_name)
    distca.close()
    checks.append(groups.resolve() is dist.group.WORLD)
    distca.close(mesh["dp"])
    return checks


def test_the_group_of_init_is_the_default(ranks):
    for checks in ranks(4).run(default_follows_init):
        assert all(checks), checks


def refused_groups(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    nameless = init_device_mesh("cpu", (2, 2))
    single = dist.new_group([0])
    elsewhere = dist.device_mesh.DeviceMesh("cpu", [(rank + 1) % 4], _init_backend=False)
    messages = []
    for group in (mesh, mesh["tp"], nameless, elsewhere, "all", single if rank else 3):
        with pytest.raises(ValueError) as refused:
            distca.init(group)
        messages.append(str(refused.value))
    return messages


def test_groups_that_cannot_share_attention_are_refused(ranks):
    expected = [
        ("axes ('dp', 'tp')", "pass mesh[('dp',)]"),
        ("axes ('tp',)", "pass the data parallel mesh"),
        ("without mesh_dim_names",),
        ("this is rank",),
        ("group is 'all'",),
        ("expected a ProcessGroup that this rank is in",),
    ]
    for messages in ranks(4).run(refused_groups):
        for message, parts in zip(messages, expected, strict=True):
            assert all(part in message for part in parts), message


@pytest.mark.parametrize("shape", [(17,), (1, 17)])
def test_a_batch_is_shifted_inside_documents_and_cut(shape):
    lengths, tokens = [5, 0, 1, 11], torch.arange(100, 117).view(shape)
    labels = tokens.clone()
    labels[..., 3] = -7  # ignored by the caller
    runs = [_run_of(rank, 3, tokens, lengths, labels=labels, ignore_index=-7) for rank in range(3)]
    assert [list(run.tokens.shape) for run in runs] == [[*shape[:-1], n] for n in (5, 6, 6)]
    joined = torch.cat([run.labels.flatten() for run in runs]).tolist()
    assert joined == [101, 102, -7, 104, -7, -7, *range(107, 117), -7]
    positions = torch.cat([run.position_ids.flatten() for run in runs]).tolist()
    assert positions == [*range(5), 0, *range(11)]
    assert torch.equal(torch.cat([tokens.flatten()[run.rows] for run in runs]), tokens.flatten())
    assert {run.num_predicted for run in runs} == {13}
    assert {run.loss_scale for run in runs} == {3 / 13}


def test_a_batch_of_two_runs_is_a_run_of_each_half():
    tokens, lengths = torch.arange(100, 119)[None], [5, 0, 1, 13]
    one = distca.shard_batch(tokens, lengths)
    runs = [_run_of(rank, 3, tokens, lengths, runs=2) for rank in range(3)]
    expected = [[0, 1, 2, *range(9, 12)], [3, 4, 5, *range(12, 15)], [6, 7, 8, *range(15, 19)]]
    assert [run.rows.tolist() for run in runs] == expected
    for run in runs:
        for name in ("tokens", "labels", "position_ids"):
            assert torch.equal(getattr(run, name), getattr(one, name)[:, run.rows]), name
        assert run.documents.run_border == 3 and run.loss_scale == 3 * one.loss_scale


def _run_of(rank: int, world_size: int, *args, **kwargs) -> distca.ShardedBatch:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_initialized", lambda: True)
        patch.setattr(groups, "resolve", lambda group: group)
        patch.setattr(dist, "get_rank", lambda group: rank)
        patch.setattr(dist, "get_world_size", lambda group: world_size)
        return distca.shard_batch(*args, **kwargs)


def test_without_a_process_group_the_run_is_the_pack():
    run = distca.shard_batch(torch.arange(6), torch.tensor([6]))
    assert run.rows == slice(0, 6) and run.loss_scale == 1 / 5
    assert run.labels.tolist() == [1, 2, 3, 4, 5, -100]
    nothing = distca.shard_batch(torch.arange(2), [1, 1])
    assert nothing.num_predicted == 0 and nothing.loss_scale == 1.0


@pytest.mark.parametrize(
    "tokens, lengths, labels, message",
    [
        (torch.zeros(2, 3), [6], None, "tokens has shape \\[2, 3\\]; expected \\[tokens\\]"),
        (torch.zeros(6), [5], None, "lengths hold 5 tokens; expected 6"),
        (torch.zeros(6), [7, -1], None, "lengths is"),
        (torch.zeros(6), [6], torch.zeros(5), "labels has shape \\[5\\]; expected \\[6\\]"),
    ],
)
def test_batches_that_are_not_one_pack_are_refused(tokens, lengths, labels, message):
    with pytest.raises(ValueError, match=message):
        distca.shard_batch(tokens, lengths, labels=labels)
