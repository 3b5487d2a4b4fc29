"""Chunks of documents and shared prefixes on a CUDA device, without a process group."""

import oracle
import pytest
import torch

import distca

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
OFFSETS = [0, 700, 1000, 1001, 1513, 2600]
DOCUMENTS = {
    "chunks": lambda: distca.Documents(OFFSETS).chunked(300),
    "prefixes": lambda: distca.Documents(OFFSETS, parents=[-1, 0, 0, 1, -1]),
}


def attend(make, inputs: list[torch.Tensor], window_size) -> list[torch.Tensor]:
    """Return out, dq, dk, dv on the CPU."""
    leaves = [each.clone().requires_grad_() for each in inputs[:3]]
    out = distca.core_attention(*leaves, make(), window_size=window_size)
    out.backward(inputs[3])
    return [out.detach().cpu(), *(leaf.grad.cpu() for leaf in leaves)]


@pytest.mark.parametrize("window_size", [(-1, 0), (200, 0), (100, 40)])
@pytest.mark.parametrize("head_dim", [128, 192])  # 192: PyTorch's kernels
@pytest.mark.parametrize("name", DOCUMENTS)
def test_within_twice_the_reference(name, head_dim, window_size):
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(OFFSETS[-1], heads, head_dim, generator=generator).bfloat16()
        for heads in (4, 2, 2, 4)
    ]
    make = DOCUMENTS[name]
    truth = attend(make, [each.double() for each in inputs], window_size)
    reference = attend(make, inputs, window_size)
    results = attend(make, [each.to(DEVICE) for each in inputs], window_size)
    limits = [2 * oracle.relative_error(*pair) for pair in zip(reference, truth, strict=True)]
    oracle.assert_close(results, truth, limits)
