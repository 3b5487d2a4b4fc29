"""Run every attention kernel on small task lists, forward and backward, under compute-sanitizer:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        python tests/sanitize_attention.py

The tools synccheck and racecheck work as well. Without caching, every tensor is a separate
allocation, so that the tool sees an access past its end.
"""

import itertools

import torch
from plain_attention import Heads, deterministic_mode, ops, random_inputs
from task_lists import Document, TaskList, cut, task_list, whole

import distca  # noqa: F401  registers the operators

MASKS = [(-1, 0), (-1, -1), (70, 0)]
TWO_SIDED = (64, 32)
HEADS = [
    Heads(4, 2, 64),
    Heads(2, 2, 64),
    Heads(4, 1, 128),
    Heads(2, 2, 96),
    Heads(4, 2, 192),
    Heads(2, 2, 192, 128),
    Heads(2, 1, 256),
]


def documents() -> list[Document]:
    return [whole(1), cut(300, [129, 1, 64]), Document(70, ()), Document(259, ((130, 259),))]


def many_documents() -> list[Document]:
    """Return documents with more key blocks than fit on a device at once.

    Each thread block then processes several of them.
    """
    return [*map(whole, (1, 130, 64)), cut(500, [129, 1, 64])] * 50


def run(tasks: TaskList, heads: Heads, dtype: torch.dtype) -> None:
    q, k, v, grad_out = random_inputs(tasks, heads, dtype)
    share = (tasks.layout, tasks.rows, heads.scale, tasks.name)
    for deterministic in (False, True):
        with deterministic_mode(deterministic):
            out, lse = ops.attend(q, k, v, *share)
            grads = ops.attend_backward(grad_out, q, k, v, out, lse, *share)
        if not all(bool(tensor.isfinite().all()) for tensor in (out, lse, *grads)):
            raise SystemExit(f"not finite: {heads}, {dtype}, {tasks.name}, {tasks.window_size}")


def main() -> None:
    device = torch.device("cuda")
    is_hopper = torch.cuda.get_device_capability(device) == (9, 0)
    dtypes = (torch.bfloat16, torch.float16)
    variants = itertools.product(HEADS, dtypes, (*MASKS, TWO_SIDED), ("home", "visiting"))
    num_lists = 0
    for heads, dtype, window_size, name in variants:
        if window_size == TWO_SIDED and not is_hopper:
            continue
        run(task_list(documents(), window_size, name, device), heads, dtype)
        num_lists += 1
    for heads in HEADS:
        run(task_list(many_documents(), (-1, 0), "visiting", device), heads, torch.bfloat16)
        num_lists += 1
    print(f"{num_lists} task lists: forward and backward, fast and deterministic")


if __name__ == "__main__":
    main()
