"""The comparison of plain_attention.py, which the GPU tests of attention use.

It accepts the CPU's kernels on any task list, and rejects errors as small as one of 200 keys.
"""

import pytest
import torch
from layout_words import numbers_of_rows
from plain_attention import Heads, Outside, Results, attend, random_inputs, reference
from task_lists import Document, cut, task_list, whole

HEADS = Heads(4, 2, 16)
SHARDS = [100, 1, 64, 7]
MASKS = [(-1, 0), (-1, -1), (40, 0), (0, 0), (20, 11)]


def some_documents() -> list[Document]:
    return [
        whole(1),
        cut(300, SHARDS),
        whole(0),
        Document(77, ()),
        Document(250, ((0, 1), (20, 90), (200, 230))),
        whole(129),
    ]


@pytest.mark.parametrize("window_size", MASKS)
@pytest.mark.parametrize("name", ["home", "visiting"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("head_dim_v", [16, 8, 40])
def test_kernels_of_the_cpu_are_accepted(dtype, name, window_size, head_dim_v):
    tasks = task_list(some_documents(), window_size, name)
    inputs = random_inputs(tasks, HEADS._replace(head_dim_v=head_dim_v), dtype)
    truth = reference(tasks, inputs, HEADS.scale)
    for deterministic in (False, True):
        truth.check(attend(tasks, inputs, HEADS.scale, deterministic))


@pytest.mark.parametrize("name", ["home", "visiting"])
def test_lists_have_as_many_rows_as_the_layout(name):
    """The helper counts rows independently of the layout."""
    tasks = task_list(some_documents(), (40, 0), name)
    num_home_rows, rows = numbers_of_rows(tasks.layout)
    num_q, num_k = rows["visiting queries"], rows["visiting keys"]
    expected = (num_home_rows, num_home_rows) if name == "home" else (num_q, num_k)
    assert (tasks.num_q_rows, tasks.num_k_rows) == expected
    assert tasks.num_q_rows > 0
    for part in tasks.served:
        assert part.q_rows.numel() == part.q_positions.numel()
        assert part.k_rows.numel() == part.k_positions.numel()


def replaced(results: Results, name: str, change) -> Results:
    tensor = getattr(results, name).clone()
    change(tensor)
    return results._replace(**{name: tensor})


def spoil_one(tensor: torch.Tensor) -> None:
    tensor[700] = float("nan")


def spoil_a_row_of_no_task(tensor: torch.Tensor) -> None:
    tensor[1010] = 1e-6


def swap_heads(tensor: torch.Tensor) -> None:
    tensor.copy_(tensor.flip(1))


def shift(tensor: torch.Tensor) -> None:
    tensor[800] += 1e-3


WINDOW = 200
ALL_OF_IT = cut(1000, [300, 1, 128])
WITHOUT_A_ROW = Document(1000, tuple(shard for shard in ALL_OF_IT.shards if shard[1] != 301))


def planted_errors(tasks, inputs):
    """Yield (name, results of `tasks` with one error)."""
    right = attend(tasks, inputs, HEADS.scale)
    for name in Results._fields:
        yield f"nan in {name}", replaced(right, name, spoil_one)
    for name in ("out", "dq", "dk", "dv"):
        yield f"{name} of no task", replaced(right, name, spoil_a_row_of_no_task)
        yield f"heads of {name}", replaced(right, name, swap_heads)
    yield "lse", replaced(right, "lse", shift)
    yield "scale", attend(tasks, inputs, 1.01 * HEADS.scale)

    without_a_row = task_list([WITHOUT_A_ROW, Document(70, ())], (WINDOW, 0))
    no_row = attend(without_a_row, inputs, HEADS.scale)
    yield "dk without a task of one row", right._replace(dk=no_row.dk)
    yield "dv without a task of one row", right._replace(dv=no_row.dv)

    window_too_short = task_list([ALL_OF_IT, Document(70, ())], (WINDOW - 1, 0))
    one_key_less = attend(window_too_short, inputs, HEADS.scale)
    for name in Results._fields:
        yield f"{name} without a key", right._replace(**{name: getattr(one_key_less, name)})


def test_planted_errors_are_rejected():
    tasks = task_list([ALL_OF_IT, Document(70, ())], (WINDOW, 0))
    inputs = random_inputs(tasks, HEADS, torch.bfloat16)
    truth = reference(tasks, inputs, HEADS.scale)
    truth.check(attend(tasks, inputs, HEADS.scale))
    accepted = []
    for name, wrong in planted_errors(tasks, inputs):
        try:
            truth.check(wrong)
            accepted.append(name)
        except Outside:
            pass
    assert accepted == []
