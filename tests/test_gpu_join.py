"""distca.join on GPUs. Two ranks may share a device."""

import os

import pytest
import torch
import uneven_training as uneven
from parallel_training import torch_attention
from ranks import MOVE_ALWAYS, Ranks
from torch import Tensor

import distca

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def pair():
    """Start two ranks. On a Hopper GPU that they share, rows still travel through peer memory."""
    is_hopper = torch.cuda.get_device_capability() == (9, 0)
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    started = Ranks(2, "nccl")
    started.run(open_session, "peer" if is_hopper else "auto")
    yield started
    del os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"]
    started.stop()


def open_session(rank: int, world_size: int, transport: str) -> None:
    distca.init(options=distca.Options(transport=transport, **MOVE_ALWAYS))


def in_bfloat16(q: Tensor, k: Tensor, v: Tensor, documents: distca.Documents) -> Tensor:
    return distca.core_attention(*(x.bfloat16() for x in (q, k, v)), documents).to(q.dtype)


def torch_in_bfloat16(q: Tensor, k: Tensor, v: Tensor, documents) -> Tensor:
    return torch_attention(*(x.bfloat16() for x in (q, k, v)), documents).to(q.dtype)


@pytest.mark.parametrize("wrapper", ["DDP", "FSDP2"])
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("num_batches", [[7, 5], [0, 7]])
def test_uneven_ranks_train_as_one_process(pair, num_batches, ahead, wrapper):
    """Training is as exact as one process with torch's attention in the same dtype."""
    truth = uneven.train_alone(num_batches, torch_attention)
    alone = uneven.train_alone(num_batches, torch_in_bfloat16, "cuda", torch.float32)
    allowed = 2 * uneven.worst_error(alone, truth)
    arguments = (num_batches, wrapper, ahead, "cuda", in_bfloat16, torch.float32)
    for result in pair.run(uneven.train, *arguments):
        assert uneven.worst_error(result, truth) <= allowed
