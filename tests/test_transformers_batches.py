"""Training batches of Trainer and SFTTrainer that are cut over ranks, and planned ahead."""

import pickle
import types

import pytest
import torch

for library in ("transformers", "accelerate", "datasets", "trl"):
    pytest.importorskip(library, reason=f"needs {library}, and this environment has none")

import packed_models as pm  # noqa: E402
import trainer_runs as runs  # noqa: E402
from accelerate.data_loader import (  # noqa: E402
    DataLoaderDispatcher,
    DataLoaderShard,
    IterableDatasetShard,
    skip_first_batches,
)
from transformers import DataCollatorWithFlattening  # noqa: E402

import distca  # noqa: E402
from distca.integrations import models, trainer  # noqa: E402

TOLERANCE = 1e-5  # of losses and gradients in float32, relative


CASES = {  # ranks, trainer, model, ranks per batch, arguments of the trainer
    "Trainer on 2": (2, "trainer", "llama", 2, {}),
    "Trainer on 4": (4, "trainer", "llama", 4, {}),
    "two batches on 4": (4, "trainer", "llama", 2, {}),
    "two windows, accumulation, checkpointing": (
        2,
        "trainer",
        "gemma3",
        2,
        {"gradient_accumulation_steps": 2, "gradient_checkpointing": True},
    ),
    "chunks": (2, "trainer", "llama4", 2, {}),
    "SFTTrainer on 2": (2, "sft", "llama", 2, {}),
    "SFTTrainer on 4": (4, "sft", "llama", 4, {}),
    "whole batches": (2, "trainer", "llama", 1, {}),
    "ping-pong": (2, "ping-pong", "llama", 2, {}),
    "ping-pong, two batches on 4": (4, "ping-pong", "llama", 2, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_batches_train_as_in_one_process(own_ranks, case):
    world_size, *how = CASES[case]
    for result in own_ranks(world_size).run(runs.results_of_cut_batches, *how):
        assert result["error"] <= TOLERANCE
        assert result["same_batch"]
        assert result["in_halves"] == (how[0] == "ping-pong")
        if world_size == how[2] == 4:
            assert result["longest"] > result["tokens_per_rank"], "a rank could hold all of them"
        at_first_layer = result["are_ahead"].count(False)
        assert result["are_ahead"].count(True) >= 2 and at_first_layer <= 4


def test_the_comparison_notices_a_lost_boundary():
    torch.manual_seed(0)
    model, collate = pm.model_of("llama"), DataCollatorWithFlattening()
    pack = collate([{"input_ids": list(range(n))} for n in (30, 9)])
    truth, _ = runs.one_process(model, [[pack]], [0.1])
    lost = {**pack, "position_ids": torch.arange(39)[None]}
    losses, _ = runs.one_process(model, [[lost]], [0.1])
    assert abs(losses[0] - truth[0]) / truth[0] > 100 * TOLERANCE


def collator(rank: int, num_ranks: int, pack: int = 0, **inner) -> trainer._Collator:
    return trainer._Collator(DataCollatorWithFlattening(**inner), rank, num_ranks, pack)


EXAMPLES = [{"input_ids": list(range(n))} for n in (7, 1, 5)]


@pytest.mark.parametrize("inner", [{}, {"return_flash_attn_kwargs": True, "return_seq_idx": True}])
def test_runs_make_up_the_batch(inner):
    whole = DataCollatorWithFlattening()(EXAMPLES)
    cut = [collator(rank, 3, **inner)(EXAMPLES) for rank in range(3)]
    names = {"input_ids", "labels", "shift_labels", "position_ids", "documents"}
    assert all(set(batch) == names for batch in cut)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(torch.cat([batch[name] for batch in cut], dim=1), whole[name])
    shifted = torch.cat([batch["shift_labels"] for batch in cut], dim=1)
    assert torch.equal(shifted[0, :-1], whole["labels"][0, 1:]) and shifted[0, -1] == -100
    pieces = torch.cat([batch["documents"].pieces(rank) for rank, batch in enumerate(cut)])
    assert pieces[:, 1:4].tolist() == [[0, 0, 4], [0, 4, 3], [1, 0, 1], [2, 0, 5]]


def test_packs_have_documents_of_their_own():
    first, second = (collator(0, 2, pack)(EXAMPLES)["documents"].pieces(0) for pack in (0, 1))
    assert not set(first[:, 1].tolist()) & set(second[:, 1].tolist())


def test_loader_processes_return_documents():
    own = pickle.loads(pickle.dumps(collator(1, 2)))
    loader = torch.utils.data.DataLoader(EXAMPLES, batch_size=3, num_workers=1, collate_fn=own)
    (batch,) = trainer._PlanningLoader(loader)
    assert isinstance(batch["documents"], distca.Documents) and batch["documents"].crosses_ranks
    assert batch["documents"].num_tokens == batch["input_ids"].shape[1] == 7


def test_a_run_that_resumes_skips_batches():
    loader = DataLoaderShard(EXAMPLES, batch_size=1, collate_fn=DataCollatorWithFlattening())
    planned = trainer._planned(loader, 1, 1)
    skipped = [batch["documents"].num_tokens for batch in skip_first_batches(planned, 1)]
    assert [batch["documents"].num_tokens for batch in planned] == [7, *skipped] == [7, 1, 5]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(16))


def test_ranks_that_share_batches_read_a_stream_alike():
    read = []
    for rank in range(4):
        shard = IterableDatasetShard(Stream(), 2, num_processes=4, process_index=rank)
        loader = DataLoaderShard(shard, batch_size=2, collate_fn=list)
        assert trainer._deal(loader, 2) == (rank % 2, rank // 2)
        read.append(list(loader))
    assert read[0] == read[1] and read[2] == read[3]
    assert sorted(sum(read[0] + read[2], [])) == list(range(16))


def test_a_loader_that_reads_on_one_rank_is_refused():
    with pytest.raises(ValueError, match="loader is a DataLoaderDispatcher, which reads batches"):
        trainer._planned(DataLoaderDispatcher(Stream()), 2, 1)


class Adding:
    """Adds keywords to a packed batch, or replaces its own; None takes one away."""

    def __init__(self, **changes) -> None:
        self.changes = changes

    def __call__(self, examples: list) -> dict:
        batch = {**DataCollatorWithFlattening()(examples), **self.changes}
        return {name: value for name, value in batch.items() if value is not None}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"position_ids": None}, "document boundaries are missing"),
        ({"labels": None}, "labels is None in a batch of shape"),
        ({"weights": torch.ones(3)}, r"weights is \[3\] in a batch of shape \[1, 13\]"),
        ({"scale": 0.5}, "scale is 0.5 in a batch"),
        ({"attention_mask": torch.zeros(1, 13)}, "13 tokens of padding; expected one row"),
        (
            {"input_ids": torch.ones(2, 13), "position_ids": torch.arange(13)[None]},
            r"input_ids has shape \[2, 13\]",
        ),
    ],
)
def test_batches_that_cannot_be_cut_are_refused(changes, message):
    batch = trainer._Collator(Adding(**changes), 0, 2, 0)(EXAMPLES)
    with pytest.raises(ValueError, match=message):
        pm.model_of("llama")(input_ids=batch["input_ids"], documents=batch["documents"])


@pytest.mark.parametrize(
    "ranks_per_batch, options, message",
    [
        (3, {}, "ranks_per_batch is 3; expected a divisor of the 2 data parallel ranks"),
        (0, {}, "ranks_per_batch is 0; expected the number of ranks"),
        (2, {"label_smoothing_factor": 0.1}, "label_smoothing_factor is 0.1"),
        (2, {"average_tokens_across_devices": False}, "average_tokens_across_devices is False"),
    ],
)
def test_trainers_that_cannot_share_batches_are_refused(
    own_ranks, ranks_per_batch, options, message
):
    for outcome in own_ranks(2).outcomes(runs.train_over, ranks_per_batch, options):
        assert outcome.error_type == "ValueError" and message in outcome.error


def test_all_ranks_learn_of_a_batch_that_one_cannot_load(fresh_pair):
    for outcome in fresh_pair.outcomes(runs.train_over, 1, {}, True):
        assert "document boundaries are missing" in outcome.error


def test_another_attention_is_refused():
    model = pm.with_attention(pm.model_of("llama"), "sdpa")
    with pytest.raises(ValueError, match="attn_implementation is 'sdpa' in plan_batches"):
        trainer.plan_batches(types.SimpleNamespace(model=model), 2)


@pytest.mark.parametrize(
    "traits, message",
    [
        ({"mixers": {"MambaMixer"}, "is_rotary": True}, "MambaMixer of Model would need the state"),
        ({"mixers": set(), "is_rotary": False, "parameters": ()}, "Model counts positions itself"),
    ],
)
def test_models_that_cannot_begin_inside_a_document_are_refused(traits, message):
    documents = distca.Documents.sharded([9], 1, 2)
    with pytest.raises(ValueError, match=message):
        models._check_crossing("Model", types.SimpleNamespace(**traits), documents)


def test_documents_of_another_batch_are_refused():
    model, documents = pm.model_of("llama"), distca.Documents([0, 4])
    ids = torch.arange(6)[None]
    with pytest.raises(ValueError, match=r"a batch of shape \[1, 6\]; expected all of them from"):
        model(input_ids=ids, position_ids=ids, documents=documents)
