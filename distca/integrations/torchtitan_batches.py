"""An override for torchtitan that plans training batches as they are loaded. It can cut them over
ranks, so that documents may be longer than one rank can hold.

    --override.imports ... 'distca.integrations.torchtitan_batches.batches={"ranks_per_batch": 8}'

Ranks that share a batch read the same rows, and each keeps a run of their tokens, or two runs for
ping-pong. In all other respects they stay data parallel. torchtitan gives attention no positions,
only metadata that the model derives from them. So this module creates the metadata of a loaded
batch.
"""

import collections
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.config.override import derive, override
from torchtitan.models.common.decoder import Decoder

from distca.integrations import boundaries
from distca.integrations.torchtitan import MODULE, BalancedAttention, VarlenMetadata
from distca.options import check
from distca.planning.documents import Documents, runs_of
from distca.ranks import session as sessions

MAX_LOADED = 1024  # batches that are not trained yet

_loaded: collections.deque[Documents | ValueError] = collections.deque(maxlen=MAX_LOADED)
"""Documents of batches that are not trained yet, or the error of a batch that cannot be trained."""
_stock = Decoder.get_attention_masks


class SharedBatches(BaseDataLoader):
    """Loads the batches of another loader. This rank keeps a run of each batch's tokens, or two for
    ping-pong, in as many rows as the batch has."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        loader: BaseDataLoader.Config
        ranks_per_batch: int = 1

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, **others
    ) -> None:
        self.num_ranks = num_ranks = config.ranks_per_batch
        self.runs = 1 if num_ranks == 1 else BalancedAttention.runs
        tokens = seq_len // self.runs
        expected = f"a divisor of {dp_world_size}, the data parallel ranks, and of {tokens} tokens"
        is_count = isinstance(num_ranks, int) and num_ranks >= 1
        is_divisor = is_count and dp_world_size % num_ranks == tokens % num_ranks == 0
        check("ranks_per_batch", num_ranks, is_divisor, expected)
        if not BalancedAttention.is_in_use:
            raise ValueError(
                f"ranks_per_batch is {num_ranks}, but no layer of the model has balanced attention;"
                f" expected the override {MODULE}.attention"
            )
        self.pack, self.rank = divmod(dp_rank, num_ranks)
        others.update(dp_world_size=dp_world_size // num_ranks, dp_rank=self.pack, seq_len=seq_len)
        self.loader = config.loader.build(**others)
        Decoder.get_attention_masks = masks_of_loaded

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        _loaded.clear()
        for inputs, labels in self.loader:
            if "positions" not in inputs:
                raise ValueError(
                    f"the batch has {sorted(inputs)}; expected positions that restart with each "
                    "document, which say where documents begin"
                )
            try:
                documents = self._documents(inputs["positions"])
                run = {name: self._cut(name, value, labels) for name, value in inputs.items()}
                batch = run, self._cut("labels", labels, labels)
                boundaries.plan_ahead(documents)
            except ValueError as error:  # raised with the masks, where all ranks learn of it
                documents, batch = error, (inputs, labels)
            _loaded.append(documents)
            yield batch

    def _documents(self, positions: Tensor) -> Documents:
        offsets = boundaries.offsets_of_positions(positions, *positions.shape)
        if self.num_ranks == 1:
            return Documents(offsets)
        place = (self.rank, self.num_ranks)
        return Documents.sharded(offsets.diff(), *place, pack=self.pack, runs=self.runs)

    def _cut(self, name: str, value: Tensor, labels: Tensor) -> Tensor:
        boundaries.check_cut(name, value, list(labels.shape))
        runs = runs_of(labels.numel(), self.rank, self.num_ranks, self.runs)
        flat = value.flatten(0, 1)
        return torch.cat([flat[run] for run in runs]).unflatten(0, (len(labels), -1))

    def state_dict(self) -> dict:
        return self.loader.state_dict()

    def load_state_dict(self, state_dict: dict) -> None:
        self.loader.load_state_dict(state_dict)


def masks_of_loaded(model: Decoder, positions: Tensor) -> object:
    """Replace Decoder.get_attention_masks: in training, return metadata of the next loaded batch.

    Raises ValueError for positions of another batch, and for models in which layers other than
    attention depend on the tokens before or after a run.
    """
    if not model.training:
        return _stock(model, positions)
    with sessions.announced(sessions.find()):
        documents = _next_loaded(positions)
        has_own_masks = type(model).get_attention_masks is not masks_of_loaded
        looks_ahead = getattr(model, "mtp_layers", None) is not None
        if documents.crosses_ranks and (has_own_masks or looks_ahead):
            raise ValueError(
                f"{type(model).__name__} has layers other than attention that need tokens of other "
                "ranks; expected none with ranks_per_batch above 1"
            )
    offsets = documents.cu_seqlens.to(positions.device)
    boundaries.remember({"cu_seq_lens_q": offsets}, documents, *positions.shape)
    # Attention finds documents by the tensor cu_seq_q. If it gets a copy, it must not take the
    # documents of a run for whole ones: without boundaries of keys, it raises an error.
    keys = offsets[:0] if documents.crosses_ranks else offsets
    longest = int(documents.cu_seqlens.diff().max())
    return VarlenMetadata(offsets, keys, longest, longest)


def _next_loaded(positions: Tensor) -> Documents:
    loaded = _loaded.popleft() if _loaded else None
    if isinstance(loaded, ValueError):
        raise loaded
    if loaded is None or not torch.equal(loaded.position_ids, positions.flatten().cpu()):
        raise ValueError(
            f"the batch has positions {list(positions.shape)}, and {loaded} was loaded; expected "
            "batches in the order of loading, each trained once: leave the override batches out"
        )
    return loaded


@override(
    target=BaseDataLoader.Config, fqns=["dataloader"], description="distca: cuts and plans batches"
)
def batches(config: BaseDataLoader.Config, ranks_per_batch: int = 1) -> SharedBatches.Config:
    """Replace the loader of training batches by SharedBatches."""
    return derive(config, SharedBatches.Config, loader=config, ranks_per_batch=ranks_per_batch)
