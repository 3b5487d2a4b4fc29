"""Promises 5 and 8: layouts, plans, pieces and costs that were tampered with are refused with
ValueError by the raw operators. Never a crash, a hang or another error."""

import re
import resource
from pathlib import Path

import pytest
import torch
from layout_words import HEADER_WORDS, MAX_WORDS, PLACE_WORDS, backend_id
from ranks import Ranks
from small_step import SHARDED, small_step
from torch import Tensor

import distca
from distca.planning.cost import AttentionShape, cost_tensor

LIMIT_S = 5.0
HANG_S = 30
ROOM_BYTES = 2 * 2**30  # for a small step; a huge count must not be allocated before it is refused
OVERFLOWING = (2**64 + 4) // 5  # times 5 words of a task it wraps around to 4
HUGE = (-(2**63), -1, 2**31, 2**40, OVERFLOWING, 2**62, 2**63 - 1)

PIECES = torch.tensor([[0, 1, 0, 900], [1, 2, 0, 8]])  # rank, document, start, length
TOLERANCE = 0.02
NO_SERVERS = torch.empty(0, 3, dtype=torch.float64)
SERVERS = torch.tensor([[1.0, 1e9, 0.0], [0.5, 1e9, 1e-3]], dtype=torch.float64)  # as in Cluster
# Ranks of a node, inside, between, hidden part, exposed part, waits forward and backward, hidden
# seconds, room forward and backward, moving part, other seconds.
LINKS = torch.tensor([2, 1e9, 1e9, 0, 1, 0, 0, 0, 1, 1, 0, 0], dtype=torch.float64)


def _cost() -> Tensor:
    return cost_tensor(distca.Options(), AttentionShape(), "cpu")


def _plan(
    pieces=PIECES,
    num_ranks=2,
    window=(-1, 0),
    cost=None,
    row_bytes=(1, 1),
    servers=NO_SERVERS,
    links=LINKS,
    tolerance=TOLERANCE,
    **others,
) -> Tensor:
    cost = _cost() if cost is None else cost
    call = torch.ops.distca.plan
    return call(pieces, num_ranks, *window, cost, row_bytes, servers, links, tolerance, **others)[0]


def _layout(plan: Tensor, rank: int = 0, pieces: Tensor = PIECES, device: str = "cpu"):
    layout, packed_rows = torch.ops.distca.layout(pieces, plan, rank, 0, device)
    return layout, torch.ops.distca.unpack_rows(layout, packed_rows)


def _alone() -> tuple[Tensor, Tensor]:
    pieces = torch.tensor([[0, 1, 0, 100]])
    return _layout(_plan(pieces, 1), pieces=pieces)


def _attend(layout: Tensor, rows: Tensor, **_) -> None:
    q = torch.ones(100, 2, 4)
    torch.ops.distca.core_attention(q, q, q, layout, rows, 1.0, "")


def _with(tensor: Tensor, index, value) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[index] = value
    return tensor


def _plans():
    yield "num_ranks 2^62", lambda: _plan(num_ranks=2**62)
    yield "num_ranks 2^33", lambda: _plan(num_ranks=2**33)
    yield "num_ranks -1", lambda: _plan(num_ranks=-1)
    yield "num_ranks below the pieces'", lambda: _plan(num_ranks=1)
    yield "window", lambda: _plan(window=(-5, 0))
    yield "row_bytes", lambda: _plan(row_bytes=(-1, 1))
    yield "one row_bytes", lambda: _plan(row_bytes=(1,))
    yield "row_bytes that wrap around", lambda: _plan(row_bytes=(2**62, 2**62))
    yield "held_bytes", lambda: _plan(held_bytes=(-1, 1))
    yield "one held_bytes", lambda: _plan(held_bytes=(1,))
    yield "one kept_bytes", lambda: _plan(kept_bytes=(1,))
    yield "a cap without kept_bytes", lambda: _plan(kept_cap_bytes=1)
    for word in range(3):
        for value in (0.0, -1.0, float("nan")):
            yield f"links {word} {value}", lambda w=word, v=value: _plan(links=_with(LINKS, w, v))
    for value in (-1.0, float("nan")):
        for word in (3, 4, 5, 6, 7, 10, 11):
            yield f"links {word} {value}", lambda w=word, v=value: _plan(links=_with(LINKS, w, v))
    for word in (8, 9):
        yield f"links {word} nan", lambda w=word: _plan(links=_with(LINKS, w, float("nan")))
    yield "two links", lambda: _plan(links=LINKS[:2])
    yield "links float32", lambda: _plan(links=LINKS.float())
    for word in range(6):
        for value in (-1.0, float("nan")):
            yield (
                f"servers {word} {value}",
                lambda w=word, v=value: _plan(servers=_with(SERVERS, w, v)),
            )
    yield "infinite speed", lambda: _plan(servers=_with(SERVERS, 0, float("inf")))
    yield "infinite lag", lambda: _plan(servers=_with(SERVERS, 2, float("inf")))
    yield "no server", lambda: _plan(servers=torch.zeros(2, 3, dtype=torch.float64))
    yield "one server", lambda: _plan(servers=SERVERS[:1])
    yield "servers 1-D", lambda: _plan(servers=SERVERS.flatten())
    yield "servers float32", lambda: _plan(servers=SERVERS.float())
    for value in (-1.0, float("nan"), float("inf")):
        yield f"tolerance {value}", lambda value=value: _plan(tolerance=value)
    yield "pieces int32", lambda: _plan(PIECES.int())
    yield "pieces of 3 words", lambda: _plan(PIECES[:, :3].contiguous())
    yield "pieces 1-D", lambda: _plan(PIECES.flatten())
    for word, value in ((0, -1), (0, 2), (0, 2**62), (2, -1), (2, 5), (3, -1), (3, 2**63 - 1)):
        yield f"piece word {word} = {value}", lambda w=word, v=value: _plan(_with(PIECES, w, v))
    yield "piece wraps around", lambda: _plan(_with(PIECES, [2, 3], 2**62))
    yield "cost float32", lambda: _plan(cost=_cost().float())
    yield "cost truncated", lambda: _plan(cost=_cost()[:5])
    for word in range(6):
        for value in (-1.0, float("nan"), float("inf")):
            yield (
                f"cost word {word} = {value}",
                lambda w=word, v=value: _plan(cost=_with(_cost(), w, v)),
            )
    wrapping = torch.ones(1030, dtype=torch.float64)
    wrapping[4], wrapping[5] = 2.0**53, 2.0**63 - 2.0**53 + 1024
    yield "cost table wraps around", lambda: _plan(cost=wrapping)
    for value in (1.0, 1e300, 2.0**32):
        yield (
            f"cost table of {value} squared",
            lambda v=value: _plan(cost=_with(_cost(), [4, 5], v)),
        )


def _encoded_plans():
    plan = _plan()
    yield "truncated", lambda: _layout(plan[:-1])
    yield "empty", lambda: _layout(plan[:0])
    yield "int32", lambda: _layout(plan.int())
    yield "of other pieces", lambda: _layout(plan, pieces=_with(PIECES, 3, 901))
    yield "rank 2", lambda: _layout(plan, rank=2)
    yield "rank -1", lambda: _layout(plan, rank=-1)
    for word in range(plan.numel()):
        for value in HUGE:
            if plan[word] != value:
                yield (
                    f"word {word} = {value}",
                    lambda w=word, v=value: _layout(_with(plan, w, v)),
                )


def _tasks():
    chosen = _plan()[5:].reshape(-1, 5)

    def plan_of(tasks=chosen, num_ranks=2, window=(-1, 0)):
        return torch.ops.distca.plan_of_tasks(PIECES, tasks, num_ranks, *window)

    assert torch.equal(plan_of(), _plan())
    yield "flat", lambda: plan_of(chosen.flatten())
    yield "int32", lambda: plan_of(chosen.int())
    yield "one left out", lambda: plan_of(chosen[1:])
    yield "one twice", lambda: plan_of(torch.cat([chosen[:1], chosen]))
    yield "too few ranks", lambda: plan_of(num_ranks=1)
    yield "window", lambda: plan_of(window=(-2, 0))
    for word in range(chosen.numel()):
        for value in HUGE:
            if chosen.view(-1)[word] != value:
                yield f"word {word} = {value}", lambda w=word, v=value: plan_of(_with(chosen, w, v))


FIRST_COUNT = 11  # words before it are used as they are
NUM_COUNTED, NUM_ROW_WORDS = 11, 12  # of a layout: what its packed rows are unpacked to
CUDA_BACKENDS = ("sm90", "aten")
VECTOR_WORDS = 4  # words of back ends begin at multiples of this in `rows`
RUN_WORDS = 5  # of packed rows: first word, word step, value, value step, count


def _layouts():
    layout, rows = _alone()
    yield "wrong magic", lambda: _attend(_with(layout, 0, 1), rows)
    yield "truncated", lambda: _attend(layout[:12], rows)
    yield "empty", lambda: _attend(layout[:0], rows)
    yield "int32", lambda: _attend(layout.int(), rows)
    yield "2-D", lambda: _attend(layout[None], rows)
    yield "rows int64", lambda: _attend(layout, rows.long())
    yield "rows 2-D", lambda: _attend(layout, rows[None])
    for word in range(FIRST_COUNT, int(layout[1])):  # counts, sections, tasks
        for value in HUGE:
            if layout[word] != value:
                yield (
                    f"word {word} = {value}",
                    lambda w=word, v=value: _attend(_with(layout, w, v), rows),
                )


def _packed_rows():
    layout, packed = torch.ops.distca.layout(PIECES, _plan(), 0, 0, "cpu")
    unpack = torch.ops.distca.unpack_rows
    for word in (NUM_COUNTED, NUM_ROW_WORDS):
        right = int(layout[word])
        for value in {*HUGE, right - 1, right + 1} - {right}:
            yield (
                f"word {word} = {value}",
                lambda w=word, v=value: unpack(_with(layout, w, v), packed),
            )
    num_runs = (packed.numel() - int(layout[NUM_ROW_WORDS] - layout[NUM_COUNTED])) // RUN_WORDS
    for run in range(num_runs):
        for field, values in {
            0: (-1, 2**31 - 1),
            1: (-1, 0, 2**31 - 1),
            4: (-1, 0, 2**31 - 1),
        }.items():
            word = RUN_WORDS * run + field
            if field == 1 and packed[RUN_WORDS * run + 4] == 1:
                values = (-1, 0)  # no step of one word leads anywhere
            for value in values:
                yield (
                    f"packed word {word} = {value}",
                    lambda w=word, v=value: unpack(layout, _with(packed, w, v)),
                )
    yield "packed rows cut short", lambda: unpack(layout, packed[:-1].clone())
    yield "packed rows too long", lambda: unpack(layout, torch.cat([packed, packed]))
    yield "packed rows int64", lambda: unpack(layout, packed.long())
    yield "packed rows 2-D", lambda: unpack(layout, packed[None])
    yield "another layout's", lambda: unpack(_alone()[0], packed)


def _for_cuda() -> tuple[Tensor, Tensor]:
    """Return a layout for CUDA of two documents, whose keys are two runs."""
    pieces = torch.tensor([[0, 1, 0, 70], [0, 2, 0, 30]])
    return _layout(_plan(pieces, 1), pieces=pieces, device="cuda")


def _word_of_first_backend() -> int | None:
    """Return the index of the first back end's words, or None if no back end for CUDA was built."""
    words = _for_cuda()[0].tolist()
    found = [words.index(backend_id(name)) for name in CUDA_BACKENDS if backend_id(name) in words]
    return min(found, default=None)


def _backend_words():
    layout, rows = _for_cuda()
    count_word = _word_of_first_backend() - 1
    at, row, of_rows = count_word + 1, int(layout[NUM_COUNTED]), []
    for _ in range(int(layout[count_word])):  # its id, host words and number of device words
        at += 2 + int(layout[at + 1])
        row = -(-row // VECTOR_WORDS) * VECTOR_WORDS
        of_rows += range(row, row := row + int(layout[at]))
        at += 1
    for word in range(count_word, at):
        right = int(layout[word])
        for value in {*HUGE, right - 1, right + 1} - {right}:
            yield (
                f"word {word - count_word} = {value}",
                lambda w=word, v=value: _attend(_with(layout, w, v), rows),
            )
    for word in of_rows:
        right = int(rows[word])
        for value in {-(2**31), -1, 0, right - 1, right + 1, 2**31 - 1} - {right}:
            yield (
                f"rows word {word} = {value}",
                lambda w=word, v=value: _attend(layout, _with(rows, w, v)),
            )
    yield "rows cut short", lambda: _attend(layout, rows[:-8].clone())
    yield "rows too long", lambda: _attend(layout, torch.cat([rows, rows]))
    yield "rows not aligned", lambda: _attend(layout, torch.cat([rows[:1], rows])[1:])


def _movements():
    """Where rows go, which the decoder of any attention call reads."""
    pieces = torch.tensor([[0, 0, 0, 300], [1, 0, 300, 300], [0, 1, 0, 64], [1, 2, 0, 100]])
    tasks = torch.tensor([[0, 300, 600, 0], [2, 0, 100, 0], [0, 0, 300, 1], [1, 0, 64, 1]])
    plan = torch.ops.distca.plan_of_tasks(pieces, tasks, 2, -1, 0)
    layout, rows = _layout(plan, 0, pieces=pieces)
    q = torch.ones(364, 2, 8)

    def attend(layout):
        torch.ops.distca.attend(q, q, q, layout, rows, 1.0, "home")

    # Rank 0 computes rows [300, 600) of rank 1's half of document 0 with all 600 keys, and document
    # 2: 400 queries visit it, 400 of their keys are rank 1's. Rank 0's deliveries follow: keys to
    # itself, then its two documents to rank 1.
    words, first = layout.tolist(), HEADER_WORDS
    assert words[first : first + 5] == [400, 700, 400, 400, 3]
    sent = [first + 5]
    for _ in range(3):
        sent.append(after_delivery(words, sent[-1]))
    assert [words[at] for at in sent[:3]] == [0, 1, 1]
    received = [sent[-1] + 1]
    assert words[sent[-1]] == 2 and words[received[0]] == 1  # two, the first from rank 1
    for _ in range(2):
        received.append(after_delivery(words, received[-1]))
    attend(layout)
    for word in range(first, received[-1]):
        for value in HUGE:
            yield (
                f"word {word - first} = {value}",
                lambda w=word, v=value: attend(_with(layout, w, v)),
            )
    yield "servers out of order", lambda: attend(_with(layout, sent[2], 0))
    yield "own rows received", lambda: attend(_with(layout, received[0], 0))
    for num in (1, 65, 1025, 70_000):
        yield f"keys sent {num} times more", lambda n=num: attend(with_last_sent_again(layout, n))


def with_last_sent_again(layout: Tensor, num: int) -> Tensor:
    """Return the layout with its last delivery to a server repeated `num` more times."""
    words, first = layout.tolist(), HEADER_WORDS + MAX_WORDS
    begin = end = first + 1
    for _ in range(words[first]):
        begin, end = end, after_delivery(words, end)
    words = words[:end] + words[begin:end] * num + words[end : words[1]]
    words[first] += num
    words[1] = len(words)
    return torch.tensor(words)


def after_delivery(words: list[int], at: int) -> int:
    """Return the index after a delivery: peer, whether it is kept, queries and keys by place."""
    at += 2
    for _ in range(2):
        at += 1 + PLACE_WORDS * words[at]
    return at


def _layouts_of_two_ranks():
    layout, rows = _layout(_plan())
    q = torch.ones(900, 2, 4)
    attention = torch.ops.distca.core_attention
    yield "no group", lambda: attention(q, q, q, layout, rows, 1.0, "")
    yield "unknown group", lambda: attention(q, q, q, layout, rows, 1.0, "unknown")
    yield "unknown tasks", lambda: torch.ops.distca.attend(q, q, q, layout, rows, 1.0, "away")
    for name, tensor in {"short": q[:7], "int": q.int(), "2-D": q[0]}.items():
        for tasks in ("home", "visiting"):
            yield (
                f"{name} q, {tasks} tasks",
                lambda t=tensor, tasks=tasks: torch.ops.distca.attend(
                    t, t, t, *_layout(_plan(), 0 if tasks == "home" else 1), 1.0, tasks
                ),
            )


def _gradients():
    layout, rows = _alone()
    q, lse = torch.ones(100, 2, 4), torch.ones(100, 2)

    def backward(grad_out=q, out=q, lse=lse, kept=None):
        torch.ops.distca.core_attention_backward(
            grad_out, q, q, q, out, lse, layout, rows, 1.0, "", kept
        )

    yield "grad_out too short", lambda: backward(grad_out=q[:3])
    yield "grad_out 2-D", lambda: backward(grad_out=q[..., 0])
    yield "out 2-D", lambda: backward(out=q[..., 0])
    yield "lse 3-D", lambda: backward(lse=q)
    yield "grad_out of another dtype", lambda: backward(grad_out=q.double())
    yield "out too short", lambda: backward(out=q[:3])
    yield "lse too short", lambda: backward(lse=lse[:3])
    yield "lse of another dtype", lambda: backward(lse=lse.double())
    yield "kept 2-D", lambda: backward(kept=q[0])
    yield "kept of another dtype", lambda: backward(kept=q.double().flatten())
    yield "kept with gaps", lambda: backward(kept=q.flatten()[::2])


CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def _devices():
    """Operators for the CPU, with one tensor on a device without data."""
    layout, rows = _alone()
    q, lse = torch.ones(100, 2, 4), torch.ones(100, 2)
    operators = {
        "core_attention_backward": ((q, q, q, q, q, lse), (1.0, "", q[:0, 0, 0])),
        "attend": ((q, q, q), (1.0, "home")),
        "attend_backward": ((q, q, q, q, q, lse), (1.0, "home")),
    }

    def call(name, tensors, others):
        getattr(torch.ops.distca, name).default.redispatch(CPU_KERNELS, *tensors, *others)

    for name, (tensors, others) in operators.items():
        tensors = (*tensors, layout, rows)
        call(name, tensors, others)
        for i in range(len(tensors)):
            away = [tensor.to("meta") if i == j else tensor for j, tensor in enumerate(tensors)]
            yield f"{name}, tensor {i}", lambda n=name, a=away, o=others: call(n, a, o)
    name, kept = "core_attention_backward", q[:0, 0, 0].to("meta")
    yield "kept", lambda: call(name, (q, q, q, q, q, lse, layout, rows), (1.0, "", kept))


def _steps():
    """Tensors of attend and its backward pass that do not belong together."""
    ops, share = torch.ops.distca, _alone()
    q, lse = torch.ones(100, 2, 4), torch.ones(100, 2)

    def attend(q=q, k=q, v=q):
        ops.attend(q, k, v, *share, 1.0, "home")

    def attend_backward(grad_out=q, q=q, k=q, v=q, out=q, lse=lse):
        ops.attend_backward(grad_out, q, k, v, out, lse, *share, 1.0, "home")

    for step in (attend, attend_backward):
        names = step.__code__.co_varnames[: step.__code__.co_argcount]
        for name, right in zip(names, step.__defaults__, strict=True):
            wrongs = {
                "0-D": right.new_ones(()),
                "1-D": right.new_ones(right.shape[0]),
                "a dimension more": right[..., None],
                "a row more": right.new_ones(right.shape[0] + 1, *right.shape[1:]),
                "ints": right.int(),
            }
            for wrong, tensor in wrongs.items():
                yield (
                    f"{step.__name__}, {name} {wrong}",
                    lambda s=step, n=name, t=tensor: s(**{n: t}),
                )


GROUPS = {
    function.__name__[1:]: function
    for function in (
        _plans,
        _encoded_plans,
        _tasks,
        _layouts,
        _packed_rows,
        _backend_words,
        _movements,
        _layouts_of_two_ranks,
        _gradients,
        _devices,
        _steps,
    )
}


def refusals(rank: int, world_size: int, group: str, last: Path) -> list[str]:
    """Cases that were not refused with ValueError. `last` holds the name of the one that runs."""
    accepted = []
    size_bytes = 1024 * int(re.search(r"VmSize:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    limit_bytes = size_bytes + ROOM_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    for name, call in GROUPS[group]():
        last.write_text(name)
        try:
            call()
            accepted.append(f"{name}: accepted")
        except ValueError:
            pass
        except Exception as error:  # any other type is what the test is about
            accepted.append(f"{name}: {error!r:.200}")
    return accepted


@pytest.mark.parametrize("group", GROUPS)
def test_raw_operators_refuse(tmp_path, group):
    if group == "backend_words" and _word_of_first_backend() is None:
        pytest.skip("a library without CUDA has no back end that reads words")
    alone = Ranks(1)
    last = tmp_path / "last"
    try:
        outcome = alone.outcomes(refusals, group, last, timeout_s=60)[0]
    finally:
        alone.stop()
    assert outcome.result is not None, f"case '{last.read_text()}': {outcome.error or 'it crashed'}"
    assert outcome.result == []


def attend_tampered(rank: int, world_size: int, word: int, value: int):
    """Rank 1's row indices are tampered with; all ranks agree on the plan itself."""
    step = small_step(rank, world_size, SHARDED)
    made = distca.plan(step.documents)
    if rank == 1:
        made.rows = _with(made.rows, word, value)
    step.attend()


@pytest.mark.parametrize("value", [-1, 2**31 - 1])
def test_row_indices_out_of_range_are_refused_on_all_ranks(value):
    group = Ranks(3)
    try:
        outcomes = group.outcomes(attend_tampered, 0, value, timeout_s=HANG_S)
    finally:
        group.stop()
    for outcome in outcomes:
        assert outcome.error_type == "ValueError", outcome
        assert outcome.seconds < LIMIT_S
    assert "rows" in outcomes[1].error
    assert all("rank(s) 1" in outcomes[rank].error for rank in (0, 2))
