"""Train ranks with unequal numbers of batches under distca.join.

The reference is one process that sees the batches of all ranks.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import parallel_training as training
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import distca

NUM_STEPS = 7
LEARNING_RATE = 0.01  # attention is sharp: with 0.5 an error grows fiftyfold in a step
Gradients = list[dict[str, Tensor]]  # by step


@dataclass
class Batch:
    tokens: Tensor
    labels: Tensor
    lengths: list[int]
    documents: distca.Documents


def batch_of(lengths: list[int], seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, training.SIZES["vocab_size"], (sum(lengths),), generator=generator)
    labels = training.labels_of(tokens, lengths) if lengths else tokens.clone()
    return Batch(tokens, labels, lengths, distca.Documents([0, *itertools.accumulate(lengths)]))


def empty() -> Batch:
    return batch_of([], 0)


def batches_of(rank: int, num_batches: int) -> list[Batch]:
    return [
        batch_of([90 + 13 * step, 3 + rank, 20], seed=100 * rank + step)
        for step in range(num_batches)
    ]


def planned(batches: Iterator[Batch], device: str, ahead: bool) -> Iterator[Batch]:
    """Plan and yield the batches. With `ahead`, plan each one while the previous one trains."""
    waiting: list[Batch] = []
    for batch in batches:
        distca.plan(batch.documents, device=device, ahead=ahead)
        waiting.append(batch)
        if len(waiting) == 1 + ahead:
            yield waiting.pop(0)
    yield from waiting


def wrap(model: nn.Module, wrapper: str, device: str, world_size: int) -> nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh(device, (world_size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().cpu().clone()


def step_of(model: nn.Module, batch: Batch, documents, device: str, scale: Tensor) -> None:
    positions = batch.documents.position_ids.to(device)
    logits = model(batch.tokens.to(device), positions, documents)
    losses = F.cross_entropy(logits, batch.labels.to(device), reduction="sum")
    (losses * scale).backward()


def gradients_then_update(model: nn.Module) -> dict[str, Tensor]:
    gradients = {}
    for name, each in model.named_parameters():
        gradients[name.removeprefix("module.")] = whole(each.grad)
        each.data.add_(each.grad, alpha=-LEARNING_RATE)
        each.grad = None
    return gradients


def train(
    rank: int,
    world_size: int,
    num_batches: list[int],
    wrapper: str,
    ahead: bool,
    device: str = "cpu",
    attention: Callable[..., Tensor] = distca.core_attention,
    dtype: torch.dtype = torch.float64,
) -> tuple[Gradients, dict[str, Tensor]]:
    """Return the gradients of every step, and the final parameters."""
    model = wrap(training.build(attention).to(device, dtype), wrapper, device, world_size)
    gradients: Gradients = []
    batches = distca.join(batches_of(rank, num_batches[rank]), empty)
    for batch in planned(batches, device, ahead):
        predicted = (batch.labels >= 0).sum().double().to(device)
        dist.all_reduce(predicted)
        step_of(model, batch, batch.documents, device, world_size / predicted)
        gradients.append(gradients_then_update(model))
    parameters = {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}
    return gradients, parameters


def train_alone(
    num_batches: list[int],
    attention: Callable[..., Tensor],
    device: str = "cpu",
    dtype: torch.dtype = torch.float64,
) -> tuple[Gradients, dict[str, Tensor]]:
    """Train in one process. `attention` takes documents as training.torch_attention does."""
    model = training.build(attention).to(device, dtype)
    ranks = [batches_of(rank, num) for rank, num in enumerate(num_batches)]
    gradients: Gradients = []
    for parts in itertools.zip_longest(*ranks):
        held = [part for part in parts if part is not None]
        lengths = [length for part in held for length in part.lengths]
        batch = Batch(
            torch.cat([part.tokens for part in held]),
            torch.cat([part.labels for part in held]),
            lengths,
            distca.Documents([0, *itertools.accumulate(lengths)]),
        )
        scale = 1 / (batch.labels >= 0).sum().double().to(device)
        documents = training.WholeDocuments.of(lengths, torch.device(device))
        step_of(model, batch, documents, device, scale)
        gradients.append(gradients_then_update(model))
    return gradients, {name: whole(each) for name, each in model.named_parameters()}


def worst_error(got: tuple, truth: tuple) -> float:
    """Return the largest error of gradients and final parameters, relative to the norm."""
    assert len(got[0]) == len(truth[0])
    pairs = [(mine[name], true[name]) for mine, true in zip(*(x[0] for x in (got, truth)),
             strict=True) for name in true]  # fmt: skip
    pairs += [(got[1][name], truth[1][name]) for name in truth[1]]
    return max(((a - b).norm() / b.norm()).item() for a, b in pairs)
