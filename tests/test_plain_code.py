"""Plain code whose documents distca reads from the arguments of the model.

Its results equal those of single documents, on any number of ranks. Arguments without readable
documents raise an error.
"""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distca
from distca import scope
from distca.integrations import plain
from distca.run import Launch

ROOT = Path(__file__).parent.parent
TOLERANCE = 1e-5
END = 3
HEADS, HEAD_DIM, VOCAB_SIZE = 4, 8, 31
LENGTHS = [[61, 1, 138], [7, 30, 3, 160], [200], [99, 101]]  # by rank
BY_POSITIONS = Launch(patch_sdpa=True, document_positions="position_ids")
BY_END = Launch(patch_sdpa=True, document_end_id=END)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * HEAD_DIM, 3 * HEADS * HEAD_DIM)

    def forward(self, x: Tensor, position_ids: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(3 * q, 3 * k, v, is_causal=True)
        return x + out.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """A model that knows nothing of documents."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB_SIZE, HEADS * HEAD_DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recompute = recompute

    def forward(self, ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(ids)
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(block, x, position_ids, use_reentrant=False)
            else:
                x = block(x, position_ids)
        return {"logits": x @ self.embedding.weight.T}


class Loss(nn.Module):
    """A module that is called with integers, like a model."""

    def forward(self, outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
        return F.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction="sum")


def tokens_of(lengths: list[int], seed: int = 0) -> Tensor:
    """Draw tokens [1, tokens]. END occurs only as the last token of each document."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(END + 1, VOCAB_SIZE, (1, sum(lengths)), generator=generator)
    ids[0, torch.tensor(lengths).cumsum(0) - 1] = END
    return ids


def positions_of(lengths: list[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: each.grad.clone() for name, each in model.named_parameters()}


def true_gradients(batches: list[tuple[Tensor, list[int]]]) -> dict[str, Tensor]:
    model = Model()
    for ids, lengths in batches:
        for document in ids.split(lengths, dim=1):
            Loss()(model(document), document).backward()
    return gradients(model)


def worst_error(got: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    return max(((got[n] - truth[n]).norm() / truth[n].norm()).item() for n in truth)


class Derived:
    """A scope that derives documents in the same way as the launcher."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch

    def __enter__(self) -> None:
        F.scaled_dot_product_attention = distca.scaled_dot_product_attention
        self.end = plain.derive_documents(
            self.launch.document_end_id, self.launch.document_positions
        )

    def __exit__(self, *error) -> None:
        self.end()
        F.scaled_dot_product_attention = scope._torch_sdpa


def train(rank: int, world_size: int, launch: Launch, way: str) -> tuple[float, int]:
    """Train two batches with a common backward pass. Return the error of gradients, and plans."""
    lengths = [LENGTHS[rank], LENGTHS[(rank + 1) % 4]]  # equally many tokens in both
    batches = [(tokens_of(each, seed), each) for seed, each in enumerate(lengths)]
    truth = true_gradients(batches)
    num_plans = distca.init().num_plans if world_size > 1 else 0
    with Derived(launch):
        model = module = Model(recompute=way == "recompute")
        if way == "compiled":
            model = torch.compile(module, backend="eager")
        elif way == "compiled in place":
            module.compile(backend="eager")
        losses = [Loss()(model(ids, position_ids=positions_of(each)), ids) for ids, each in batches]
        sum(losses).backward()
        assert scope.documents_in_force() is None
    num_plans = distca.init().num_plans - num_plans if world_size > 1 else 0
    return worst_error(gradients(module), truth), num_plans


@pytest.mark.parametrize("way", ["eager", "recompute", "compiled", "compiled in place"])
@pytest.mark.parametrize("launch", [BY_POSITIONS, BY_END], ids=["positions", "end id"])
def test_gradients_equal_the_model_by_document(ranks, launch, way):
    for error, num_plans in ranks(2).run(train, launch, way):
        assert error <= TOLERANCE and num_plans == 2


@pytest.mark.parametrize("launch", [BY_POSITIONS, BY_END], ids=["positions", "end id"])
def test_on_four_ranks_and_without_a_group(ranks, launch):
    for error, num_plans in ranks(4).run(train, launch, "recompute"):
        assert error <= TOLERANCE and num_plans == 2
    assert train(0, 1, launch, "eager")[0] <= TOLERANCE


def test_the_comparison_notices_a_lost_boundary():
    model, ids = Model(), tokens_of(LENGTHS[0])
    Loss()(model(ids), ids).backward()
    assert worst_error(gradients(model), true_gradients([(ids, LENGTHS[0])])) > 100 * TOLERANCE


@pytest.mark.parametrize("launch", [BY_POSITIONS, BY_END], ids=["positions", "end id"])
def test_rows_of_a_batch_and_positional_arguments(launch):
    ids = tokens_of([6, 2, 5, 3]).view(2, 8)
    positions = positions_of([6, 2, 5, 3]).view(2, 8)
    with torch.no_grad():
        rows = ids.view(1, 16).split([6, 2, 5, 3], dim=1)
        truth = torch.cat([Model()(row)["logits"] for row in rows], dim=1).view(2, 8, -1)
        with Derived(launch):
            got = nn.Sequential(Model())[0](ids, positions)["logits"]
    assert (got - truth).norm() <= TOLERANCE * truth.norm()


def evaluate_unevenly(rank: int, world_size: int) -> tuple[float, int]:
    """Evaluate on rank 1 only, in eval mode with gradients and in train mode without."""
    num_plans, worst = distca.init().num_plans, 0.0
    ids = tokens_of(LENGTHS[0])
    truth = torch.cat([Model()(each)["logits"] for each in ids.split(LENGTHS[0], dim=1)], dim=1)
    with Derived(BY_END):
        for trains in [True, False] * rank:
            with torch.set_grad_enabled(not trains):
                got = Model().train(trains)(ids)["logits"]
            worst = max(worst, ((got - truth).norm() / truth.norm()).item())
    return worst, distca.init().num_plans - num_plans


def evaluate_together(rank: int, world_size: int) -> tuple[float, int]:
    distca.close()
    distca.init(options=distca.Options(balance_no_grad=True))
    results = evaluate_unevenly(1, world_size)  # both passes on every rank
    distca.close()
    return results


def test_evaluation_is_balanced_on_request(ranks):
    for error, num_plans in ranks(2).run(evaluate_together):
        assert error <= TOLERANCE and num_plans == 2


def test_evaluation_stays_on_its_rank(ranks):
    for error, num_plans in ranks(2).run(evaluate_unevenly):
        assert error <= TOLERANCE and num_plans == 0


WRONG = {
    "positions that jump": (
        BY_POSITIONS,
        {"position_ids": torch.tensor([[0, 1, 2, 5, 6, 0, 1, 2, 3, 4, 5, 6]])},
        "position_ids is 5 at token 3 of row 0",
    ),
    "3-D positions": (
        BY_POSITIONS,
        {"position_ids": torch.zeros(3, 1, 12, dtype=torch.int64)},
        r"position_ids has shape \[3, 1, 12\]; expected \[tokens\] or",
    ),
    "positions of fewer tokens": (
        BY_POSITIONS,
        {"position_ids": torch.arange(5)[None]},
        "query has 1 rows of 12 tokens, but the documents were read from .* 1 rows of 5 tokens",
    ),
    "no positions": (BY_POSITIONS, {}, "--document-positions is given, but no model"),
    "one-hot tokens": (
        BY_END,
        {"ids": torch.zeros(1, 3, 4, dtype=torch.int64)},
        r"the tensor of token ids has shape \[1, 3, 4\]",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_arguments_without_readable_documents_are_an_error(case):
    launch, keywords, message = WRONG[case]
    model = Model()
    with Derived(launch):
        with pytest.raises(ValueError, match=message):
            model(**{"ids": tokens_of([12]), **keywords})
        good = model(tokens_of([12]), torch.arange(12)[None])  # the next batch is read again
    assert good["logits"].isfinite().all()


def test_attention_without_a_model_is_an_error():
    q = torch.ones(1, 1, 4, 8)
    with Derived(BY_END), pytest.raises(ValueError, match="--document-end-id is given, but no"):
        F.scaled_dot_product_attention(q, q, q, is_causal=True)
    assert F.scaled_dot_product_attention(q, q, q, is_causal=True).shape == q.shape


def fail_on_one_rank(rank: int, world_size: int) -> str:
    positions = positions_of([5, 5]) + (rank == 1)
    distca.init()
    with Derived(BY_POSITIONS), pytest.raises(Exception, match="position_ids") as raised:
        Model()(tokens_of([5, 5]), positions)
    return str(raised.value)


def test_a_bad_batch_on_one_rank_is_an_error_on_all(ranks):
    for message in ranks(2).run(fail_on_one_rank):
        assert "position_ids is 1 at token 0 of row 0" in message
    ranks(2).stop()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"document_end_id": -4, "patch_sdpa": True}, "document_end_id is -4; expected a token id"),
        ({"document_end_id": 2}, "document_end_id is 2, patch_sdpa False; expected both"),
        ({"ping_pong": True}, "ping_pong is True, but transformers is False; expected both"),
        (
            {"document_end_id": 2, "document_positions": "x", "patch_sdpa": True},
            "document_end_id is 2 and document_positions 'x'; expected one of them",
        ),
    ],
)
def test_impossible_launches_are_refused(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Launch(**arguments)
