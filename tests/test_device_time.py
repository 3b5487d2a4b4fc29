"""benchmarks/device_time.py: the breakdown of a step's time, on handwritten traces."""

import itertools
import random
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
from device_time import (  # noqa: E402
    ATTENTION,
    COMMUNICATION,
    COMPUTE,
    PEER_KERNEL,
    WAITING,
    Span,
    spans_of,
    step_profile,
    with_waiting,
)
from intervals import length, merged, without  # noqa: E402

GATHER = "ncclDevKernel_AllGather_RING_LL"


def test_intervals_against_counting():
    generator = random.Random(0)
    for _ in range(200):
        one, other = (
            [
                tuple(sorted(generator.choices(range(30), k=2)))
                for _ in range(generator.randint(0, 6))
            ]
            for _ in range(2)
        )
        inside = [{at for begin, end in each for at in range(begin, end)} for each in (one, other)]
        left = without(merged(one), merged(other))
        assert {at for begin, end in left for at in range(begin, end)} == inside[0] - inside[1]
        assert length(left) == len(inside[0] - inside[1])
        assert length(merged(one + other)) == len(inside[0] | inside[1])
        assert all(a[1] < b[0] for a, b in itertools.pairwise(merged(one)))


def event(name: str, begin: float, duration: float, stream: int, category: str = "kernel") -> dict:
    times = {"ts": begin, "dur": duration, "tid": stream}
    return {"ph": "X", "cat": category, "name": name, **times}


@pytest.mark.parametrize(
    "name, kind, role",
    [
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", COMMUNICATION, None),
        (
            "void distca::transport::peer::(anonymous namespace)::store_kernel(",
            COMMUNICATION,
            "store",
        ),
        (
            "void distca::transport::peer::(anonymous namespace)::fetch_kernel<",
            COMMUNICATION,
            "fetch",
        ),
        (
            "distca::transport::peer::(anonymous namespace)::await_rows_kernel(",
            COMMUNICATION,
            "await_rows",
        ),
        (
            "distca::transport::peer::(anonymous namespace)::publish_kernel(",
            COMMUNICATION,
            "publish",
        ),
        (
            "_ZN6distca9transport4peer52_GLOBAL__N__12start_kernelENS1_5BoardE",
            COMMUNICATION,
            "start",
        ),
        (
            "void distca::transport::(anonymous namespace)::copy_rows_kernel<true>(",
            COMMUNICATION,
            "",
        ),
        ("distca::transport::(anonymous namespace)::hold_kernel()", COMMUNICATION, ""),
        ("void distca::attention::sm90::(anonymous namespace)::backward_kernel<", ATTENTION, ""),
        ("void distca::attention::sm90::(anonymous namespace)::finish_kernel<", ATTENTION, ""),
        (
            "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<",
            ATTENTION,
            "",
        ),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma", ATTENTION, ""),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT", COMPUTE, ""),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::", COMPUTE, ""),
    ],
)
def test_kinds_and_roles_of_kernels(name, kind, role):
    (span,) = spans_of({"traceEvents": [event(name, 1, 2, 7)]})
    assert (span.begin, span.end, span.kind) == (1, 3, kind)
    assert span.role == (name.split("(")[0] if role is None else role)


def test_copies_are_communication_on_streams_without_compute():
    copies = [
        event("Memcpy DtoD (Device -> Device)", 0, 1, 7, "gpu_memcpy"),
        event("Memcpy DtoD (Device -> Device)", 0, 1, 20, "gpu_memcpy"),
        event("Memcpy PtoP (Device -> Device)", 0, 1, 21, "gpu_memcpy"),
        event("Memcpy HtoD (Pinned -> Device)", 0, 1, 22, "gpu_memcpy"),
        event("cudaLaunchKernel", 0, 1, 1, "cuda_runtime"),
        event("gemm", 0, 1, 7),
    ]
    trace = {"traceEvents": copies, "baseTimeNanoseconds": 5_000}
    kinds = {(span.stream, span.kind) for span in spans_of(trace)}
    moved = {(20, COMMUNICATION), (21, COMMUNICATION)}
    assert kinds == {(7, COMPUTE), (22, COMPUTE), *moved}
    assert {span.begin for span in spans_of(trace)} == {5}


def test_operators_are_the_spans_on_the_cpu():
    names = ("aten::mm", "distca::core_attention", "gloo:all_reduce", "c10d::allreduce_", "other")
    trace = {"traceEvents": [event(name, 0, 1, 1, "cpu_op") for name in names]}
    kinds = [span.kind for span in spans_of(trace)]
    assert kinds == [COMPUTE, ATTENTION, COMMUNICATION, COMMUNICATION]


def test_exposed_and_hidden_by_hand():
    """The rank computes in [0, 40) and [60, 100), communicates in [30, 50), and idles in between.

    Times are microseconds.
    """
    spans = [
        Span(0, 30, COMPUTE),
        Span(20, 40, ATTENTION),
        Span(30, 50, COMMUNICATION),
        Span(60, 100, COMPUTE),
    ]
    (profile,) = [step_profile([spans])]
    assert profile == {
        "step_ms": [0.1],
        "compute_ms": [0.08],
        "attention_ms": [0.02],
        "communication_ms": [0.02],
        "exposed_ms": [0.01],
        "waiting_ms": [0],
        "idle_ms": [0.01],
    }
    assert set(step_profile([[]])["step_ms"]) == {0}


def kinds_of(spans: list[Span]) -> list[tuple[float, float, str]]:
    return [(span.begin, span.end, span.kind) for span in spans if span.begin < span.end]


def test_an_nccl_kernel_waits_for_the_last_rank():
    early = [Span(0, 30, COMPUTE), Span(30, 70, COMMUNICATION, GATHER, 9)]
    late = [Span(0, 55, COMPUTE), Span(55, 70, COMMUNICATION, GATHER, 12)]
    ranks = with_waiting([early, late])
    assert kinds_of(ranks[0])[1:] == [(30, 55, WAITING), (55, 70, COMMUNICATION)]
    assert kinds_of(ranks[1])[1:] == [(55, 70, COMMUNICATION)]
    profile = step_profile(ranks)
    assert profile["waiting_ms"] == [0.025, 0]
    assert profile["exposed_ms"] == profile["communication_ms"] == [0.015, 0.015]


def test_kernels_meet_by_order_on_their_stream():
    one = [Span(at, at + 5, COMMUNICATION, GATHER, 9) for at in (0, 10)]
    other = [Span(at, at + 5, COMMUNICATION, GATHER, 9) for at in (2, 13)]
    assert kinds_of(with_waiting([one, other])[0]) == [
        (0, 2, WAITING),
        (2, 5, COMMUNICATION),
        (10, 13, WAITING),
        (13, 15, COMMUNICATION),
    ]
    # Ranks have different numbers of kernels, so nobody knows which ones meet.
    assert with_waiting([one, other[:1]]) == [one, other[:1]]
    # A rank that arrives after the kernel has ended does not count.
    after = [Span(at, at + 5, COMMUNICATION, GATHER, 9) for at in (7, 13)]
    assert kinds_of(with_waiting([one, after])[0])[0] == (0, 5, COMMUNICATION)


def peer_call(began: float, published: float, awaits: float, end: float) -> list[Span]:
    """Return the spans of a call on a rank that computes for no other rank."""
    return [
        Span(began, began + 1, COMMUNICATION, "store"),
        Span(published, published + 1, COMMUNICATION, "publish"),
        Span(published + 1, published + 2, COMMUNICATION, "store"),
        Span(awaits, end, COMMUNICATION, "await_results"),
        Span(end, end + 1, COMMUNICATION, "fetch"),
    ]


def waits_of(spans: list[Span]) -> list[tuple[float, float]]:
    return [each[:2] for each in kinds_of(spans) if each[2] == WAITING]


def test_peer_kernels_wait_for_calls_and_for_results():
    """Kernels wait until the other rank begins its call, and until it publishes.

    The second rank begins its call at 8 and publishes at 30. The first awaits rows from 3 to 12,
    and results from 25 on.
    """
    first = [*peer_call(0, 20, 25, 40), Span(3, 12, COMMUNICATION, "await_rows")]
    first = sorted(first, key=lambda span: span.begin)
    ranks = with_waiting([first, peer_call(8, 30, 32, 40)])
    assert waits_of(ranks[0]) == [(3, 8), (25, 30)] and waits_of(ranks[1]) == []
    spans = kinds_of(ranks[0])
    assert (8, 12, COMMUNICATION) in spans and (30, 40, COMMUNICATION) in spans
    assert step_profile(ranks)["waiting_ms"] == pytest.approx([0.010, 0])


def test_a_call_without_fetch_ends_with_finish():
    """Results that a rank publishes after it has finished belong to another call."""
    calls = {0: "start", 10: "publish", 12: "finish", 20: "start", 30: "publish"}
    own = [Span(at, at + 1, COMMUNICATION, role) for at, role in calls.items()]
    other = [*peer_call(0, 5, 6, 14), *peer_call(20, 22, 24, 33)]
    assert waits_of(with_waiting([own, other])[1]) == [(6, 10), (24, 30)]


def test_an_exchange_ends_when_its_rows_have_arrived():
    """The second rank begins its first call at 8, its second at 24."""
    first = [Span(at, at + 1, COMMUNICATION, "store") for at in (0, 20)]
    first += [Span(3, 12, COMMUNICATION, "close"), Span(22, 26, COMMUNICATION, "close")]
    other = [Span(at, at + 1, COMMUNICATION, "store") for at in (8, 24)]
    other += [Span(10, 12, COMMUNICATION, "close"), Span(25, 26, COMMUNICATION, "close")]
    ranks = [sorted(spans, key=lambda span: span.begin) for spans in (first, other)]
    assert waits_of(with_waiting(ranks)[0]) == [(3, 8), (22, 24)]


def test_peer_kernels_have_the_names_of_the_sources():
    sources = (Path(__file__).parent.parent / "csrc/transport/peer").glob("*.cu")
    text = "".join(source.read_text() for source in sources)
    assert {*re.findall(r"(\w+)_kernel\(const __grid", text)} == {
        *re.search(r"\((.*)\)", PEER_KERNEL.pattern)[1].split("|")
    }
