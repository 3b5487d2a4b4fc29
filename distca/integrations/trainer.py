"""Plans the training batches of transformers' Trainer and TRL's SFTTrainer ahead. It can cut them
over ranks, so that documents may be longer than one rank can hold.

accelerate deals whole batches to groups of ranks, and the collator cuts them. In all other respects
the ranks stay data parallel, so DDP, FSDP and the loss over all tokens need no change.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from accelerate.data_loader import BatchSamplerShard, DataLoaderShard, IterableDatasetShard

from distca.integrations.boundaries import PACK, check_cut, plan_ahead, read_boundaries
from distca.integrations.models import BOUNDARIES, NAME, NAMES
from distca.options import check
from distca.pingpong.pingpong import PingPong
from distca.planning.batches import cut
from distca.planning.documents import Documents

# Keywords that a run of tokens does not need, because its documents replace them.
REPLACED = {*BOUNDARIES, "max_length_q", "max_length_k", "attention_mask"} - {"position_ids"}


def plan_batches(trainer: Any, ranks_per_batch: int = 1) -> Any:
    """Make `trainer` plan its training batches as they are loaded, one step ahead, and return it.

    If `ranks_per_batch` is above 1, that many neighbouring ranks get the same batch, and each
    trains on a run of its tokens. Runs differ by at most one token, and documents may cross ranks.
    Token ids, labels and positions are cut together, and the loss is that of the whole batch.
    Evaluation batches stay whole. Call this function after the trainer is built and before it
    trains. The collator must pack, as for attn_implementation="distca". If the model is in
    ping-pong, each rank gets two runs.

    Raises ValueError for a model with another attention, and for settings of the trainer under
    which the loss of a run would not be its share of the batch's loss.
    """
    attention = getattr(trainer.model.config, "_attn_implementation", None)
    if attention not in NAMES:
        raise ValueError(
            f"attn_implementation is {attention!r} in plan_batches; expected {NAME!r}, because no "
            "other attention uses the plans"
        )
    is_count = isinstance(ranks_per_batch, int) and ranks_per_batch >= 1
    check("ranks_per_batch", ranks_per_batch, is_count, "the number of ranks that share a batch")
    if ranks_per_batch > 1:
        _check_loss(trainer)
    is_in_halves = any(isinstance(module, PingPong) for module in trainer.model.modules())
    build, runs = trainer.get_train_dataloader, 2 if is_in_halves else 1

    def get_train_dataloader() -> DataLoaderShard:
        return _planned(build(), ranks_per_batch, runs)

    trainer.get_train_dataloader = get_train_dataloader
    return trainer


def _check_loss(trainer: Any) -> None:
    """Raise ValueError unless the trainer divides a run's loss by the tokens of all ranks."""
    args, remedy = trainer.args, "with ranks_per_batch above 1; expected"
    if not args.average_tokens_across_devices or not trainer.model_accepts_loss_kwargs:
        raise ValueError(
            f"average_tokens_across_devices is {args.average_tokens_across_devices} and "
            f"model_accepts_loss_kwargs {trainer.model_accepts_loss_kwargs} {remedy} True for "
            "both: a run's loss is divided by the tokens of all ranks"
        )
    if trainer.label_smoother is not None or trainer.compute_loss_func is not None:
        raise ValueError(
            f"label_smoothing_factor is {args.label_smoothing_factor} and compute_loss_func "
            f"{trainer.compute_loss_func} {remedy} 0 and None: they would shift the labels of a "
            "run, whose last token predicts the next rank's first"
        )


def _planned(loader: DataLoaderShard, ranks_per_batch: int, runs: int) -> DataLoaderShard:
    """Make the loader deal whole batches to groups of ranks, cut them in the collator, and plan
    them. Return it."""
    if not isinstance(loader, DataLoaderShard):
        raise ValueError(
            f"the training data loader is a {type(loader).__name__}, which reads batches on one "
            "rank for all; expected a DataLoaderShard: "
            'accelerator_config={"dispatch_batches": False}'
        )
    rank = pack = 0
    if ranks_per_batch > 1:
        rank, pack = _deal(loader, ranks_per_batch)
    base = loader.base_dataloader
    base.collate_fn = _Collator(base.collate_fn, rank, ranks_per_batch, pack, runs)
    loader.base_dataloader = _PlanningLoader(base)
    return loader


def _deal(loader: DataLoaderShard, ranks_per_batch: int) -> tuple[int, int]:
    """Let each group of `ranks_per_batch` neighbouring ranks read the same batches. Return this
    rank's number in its group, and the group's number."""
    kinds = (BatchSamplerShard, IterableDatasetShard)
    parts = (loader.batch_sampler, loader.sampler, loader.dataset)
    shard = next((each for each in parts if isinstance(each, kinds)), None)
    if shard is None and PartialState().num_processes == 1:
        raise ValueError(f"ranks_per_batch is {ranks_per_batch}; expected 1 for a single process")
    if shard is None:
        raise ValueError(
            f"the data set is a {type(loader.dataset).__name__} that ranks do not share by "
            "index; expected a data set with a length, or one stream for all ranks"
        )
    if shard.num_processes % ranks_per_batch:
        raise ValueError(
            f"ranks_per_batch is {ranks_per_batch}; expected a divisor of the "
            f"{shard.num_processes} data parallel ranks"
        )
    shard.num_processes //= ranks_per_batch
    shard.process_index, rank = divmod(shard.process_index, ranks_per_batch)
    return rank, shard.process_index


@dataclass
class _Collator:
    """Adds documents to the batches of another collator, and cuts them to this rank's run. If a
    batch cannot be cut, its `documents` are the error that the model must raise."""

    collate: Callable[[list], dict]
    rank: int
    num_ranks: int
    pack: int
    runs: int = 1

    def __call__(self, examples: list) -> dict:
        batch = dict(self.collate(examples))
        try:
            return self._cut(batch)
        except ValueError as error:  # raised by the model, where all ranks learn of it
            return {**batch, "documents": error}

    def _cut(self, batch: dict) -> dict:
        rows, num_tokens = batch["input_ids"].shape
        offsets = read_boundaries(batch, rows, num_tokens, "the collator's batch").offsets
        if self.num_ranks == 1:
            return {**batch, "documents": Documents(offsets)}
        _check_row(batch)
        others = {name: value for name, value in batch.items() if name not in REPLACED}
        for name in ("labels", *others):
            check_cut(name, batch.get(name), [rows, num_tokens])
        tokens, labels = batch["input_ids"], batch["labels"]
        place = (self.rank, self.num_ranks, self.runs)
        run = cut(tokens, offsets.diff(), labels, *place, pack=self.pack)
        others = {name: value[:, run.rows] for name, value in others.items()}
        own = {"position_ids": run.position_ids, "documents": run.documents}
        return {"shift_labels": run.labels, **others, **own}


def _check_row(batch: dict) -> None:
    shape = list(batch["input_ids"].shape)
    mask = batch.get("attention_mask")
    num_padding = 0 if mask is None else int((mask == 0).sum())
    if shape[0] != 1 or num_padding:
        raise ValueError(
            f"input_ids has shape {shape}, with {num_padding} tokens of padding; expected one row "
            f"without, to cut over ranks: {PACK}"
        )


class _PlanningLoader:
    """A data loader that plans the documents of each batch when it arrives in this process."""

    def __init__(self, loader: torch.utils.data.DataLoader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[dict]:
        for batch in self._loader:
            if isinstance(batch["documents"], Documents):
                plan_ahead(batch["documents"])
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    @property
    def __class__(self) -> type:  # accelerate and transformers ask for the class
        return type(self._loader)
