"""Micro-batches of Megatron-Core that are planned ahead, or whose documents cross ranks."""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import attention
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from distca.integrations import boundaries
from distca.integrations.megatron import boundaries_in, tensor_in
from distca.planning.documents import Documents, check_documents

_positions = WeakTensorKeyDictionary()  # of rows whose documents cross ranks, by cu_seqlens
_stock_rotary = attention.apply_rotary_pos_emb


def packed_seq_params(
    documents: Documents, device: torch.device | str | None = None
) -> PackedSeqParams:
    """Return the PackedSeqParams of a micro-batch that holds `documents`, on `device`. They may
    cross ranks, as those of distca.shard_batch do: rotary embeddings then count positions from the
    start of a document on another rank. Make a new object for each micro-batch."""
    check_documents(documents)
    cu_seqlens = documents.cu_seqlens.to(device or "cpu", torch.int32)
    longest = int(documents.cu_seqlens.diff().max()) if documents.cu_seqlens.numel() > 1 else 0
    if documents.crosses_ranks:
        _positions[cu_seqlens] = documents.position_ids.to(cu_seqlens.device)
        longest = int(documents.position_ids.max()) + 1 if documents.num_tokens else 0
        attention.apply_rotary_pos_emb = apply_rotary_pos_emb
    boundaries.remember_tensor(cu_seqlens, documents)
    both = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_kv": cu_seqlens}
    return PackedSeqParams("thd", **both, max_seqlen_q=longest, max_seqlen_kv=longest)


def plan_ahead(packed_seq_params: PackedSeqParams) -> None:
    """Plan the documents of a later micro-batch in the background, for the windows and heads of
    this stage's latest training pass. Does nothing before the first pass. Collective over the data
    parallel ranks of the stage, which call it in the same order. Reads cu_seqlens, which waits for
    the device if it is there.

    Raises ValueError if the boundaries are not those of packed documents.
    """
    documents = boundaries_in(packed_seq_params).here.unplanned()
    boundaries.plan_ahead(documents)
    boundaries.remember_tensor(tensor_in(packed_seq_params, "q")[1], documents)


def apply_rotary_pos_emb(
    t: Tensor, freqs: Tensor, config, cu_seqlens: Tensor | None = None, **others
) -> Tensor:
    """Do what Megatron's function of this name does, also for rows `t` [tokens, heads, head_dim]
    whose documents cross ranks."""
    positions = None if cu_seqlens is None else _positions.get(cu_seqlens)
    if positions is None:
        return _stock_rotary(t, freqs, config, cu_seqlens=cu_seqlens, **others)
    return _stock_rotary(t.unsqueeze(1), freqs[positions], config, **others).squeeze(1)
