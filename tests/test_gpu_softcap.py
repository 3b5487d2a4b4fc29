"""Capped scores on Hopper GPUs."""

import oracle
import pytest
import torch
from oracle import Case
from test_gpu import LENGTHS, gpu_ranks  # noqa: F401  a fixture
from test_gpu_attention import has_hopper_kernels
from test_gpu_lse import attend, check
from test_gpu_peer import peer_ranks  # noqa: F401  a fixture
from test_lse import grad_lse_of

import distca

pytestmark = pytest.mark.gpu

HEADS = [(8, 2, 128), (8, 4, 256), (4, 4, 64), (6, 2, 192), (3, 1, 40)]
# softcap, standard deviation of q and k. That of scores is the latter squared.
CAPS = {"tight": (1.5, 1.0), "30": (30.0, 4.0), "50": (50.0, 5.0)}
WINDOWS = [(-1, 0), (200, 0), (-1, -1), (64, 32)]


@pytest.fixture(autouse=True)
def hopper():
    if not has_hopper_kernels(128):
        pytest.skip("only Hopper kernels cap scores")


def case_of(lengths, heads, cap: str, **keywords) -> Case:
    softcap, size = CAPS[cap]
    return Case(lengths, *heads, qk_size=size, softcap=softcap, **keywords)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_on_one_device(dtype, heads, cap, deterministic):
    for window in WINDOWS:
        case = case_of([sum(LENGTHS, [])], heads, cap, window_size=window, dtype=dtype)
        check([attend(0, 1, case, grad_lse_of(case), deterministic)], case, grad_lse_of(case))


@pytest.mark.parametrize("deterministic", [False, True])
def test_another_head_dim_of_v(deterministic):
    for dims in ((192, 128), (64, 256)):
        heads = (4, 2, dims[0])
        case = case_of([[700, 3]], heads, "50", dtype=torch.bfloat16, head_dim_v=dims[1])
        check([attend(0, 1, case, grad_lse_of(case), deterministic)], case, grad_lse_of(case))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
@pytest.mark.parametrize("transport", ["peer_ranks", "gpu_ranks"])
def test_on_two_ranks(request, transport, heads, deterministic):
    two_ranks = request.getfixturevalue(transport)(2)
    case = case_of(LENGTHS[:2], heads, "50", dtype=torch.bfloat16)
    results = two_ranks.run(attend, case, grad_lse_of(case), deterministic)
    check(results, case, grad_lse_of(case))


def test_deterministic_mode_gives_the_same_bits():
    case = case_of([sum(LENGTHS, [])], HEADS[0], "50", dtype=torch.bfloat16)
    first, second = (attend(0, 1, case, grad_lse_of(case), True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("heads", HEADS[:2], ids=str)
def test_another_cap_is_noticed(heads):
    case = case_of([[700, 3]], heads, "tight", dtype=torch.float16)
    results = [attend(0, 1, case, grad_lse_of(case), False)]
    check(results, case, grad_lse_of(case))
    case.softcap *= 1.01
    with pytest.raises(AssertionError):
        check(results, case, grad_lse_of(case))


def test_scores_beyond_the_cap_tie():
    """Scores of 1e4 and more are capped to equal ones, so that rows are means of the values."""
    q, k, v = torch.randn(3, 300, 2, 128, device="cuda").bfloat16()
    q, k = q.abs() * 1e3, k.abs() * 1e3
    out = distca.core_attention(q, k, v, distca.Documents([0, 300]), softcap=50.0)
    count = torch.arange(1, 301, device="cuda")[:, None, None]
    assert oracle.max_error(out, v.double().cumsum(0) / count) < 0.02


def test_wide_caps_are_refused():
    q = torch.randn(8, 2, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="softcap is 2000; .* takes softcaps up to 1000 on Hopper"):
        distca.core_attention(q, q, q, distca.Documents([0, 8]), softcap=2000.0)
