"""Train on samples whose lengths have a long tail, as in reinforcement learning.

    torchrun --nproc-per-node 4 examples/rl_lengths.py

A step computes the log-probabilities of its samples without gradients, then trains on them, micro-
batch by micro-batch. All ranks have equally many micro-batches, of --most-tokens tokens at most, as
verl and other stacks guarantee. The same samples are trained in several ways: micro-batches are
filled in order of arrival, or sorted by the Karmarkar-Karp method, for like sums of squared lengths
or of tokens; attention is balanced by distca or not. Both kinds of passes are balanced.

The script runs on the CPU (gloo, float32) and on CUDA devices (NCCL, bfloat16). It prints a table
with the median of the steps after the first. --write FILE only writes the lengths, as JSON.
"""

import argparse
import gc
import itertools
import json
import math
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import distca
from distca.options import make_writable
from distca.simulate.packing import sorted_micro_batches

SIZES = {  # longest sample in tokens, and the model
    "cpu": {"longest": 1024, "hidden": 64, "layers": 2, "heads": 4, "kv_heads": 2},
    "cuda": {"longest": 32768, "hidden": 2048, "layers": 4, "heads": 16, "kv_heads": 4},
}
VOCAB_SIZE, IGNORE_INDEX = 512, -100
LARGEST_FLOAT32_DIFFERENCE = 1e-4  # of log-probabilities that differ only in summation order
Held = list[list[list[int]]]  # indices of samples [micro-batches][ranks][samples]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="at least 2; the first is warm-up")
    parser.add_argument("--samples", type=int, default=64, help="of a step, on all ranks")
    parser.add_argument("--longest", type=int, help="tokens; 1024 on CPU, 32768 on CUDA")
    parser.add_argument("--most-tokens", type=int, help="of a micro-batch; default: --longest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", type=Path, help="file for the lengths of all steps")
    args = parser.parse_args()
    if args.write is None and "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 examples/rl_lengths.py")
    if args.steps < 2:
        parser.error(f"--steps is {args.steps}; needs at least 2")
    try:
        make_writable("--write", args.write)
    except ValueError as error:
        parser.error(str(error))
    args.device_type = "cuda" if torch.cuda.is_available() else "cpu"
    args.longest = args.longest or SIZES[args.device_type]["longest"]
    args.most_tokens = args.most_tokens or args.longest
    if args.most_tokens < args.longest:
        parser.error(f"--most-tokens is {args.most_tokens}; needs --longest, {args.longest}")
    return args


def lengths_of_step(num_samples: int, longest: int, seed: int) -> list[int]:
    """Draw the tokens of samples, prompt and response together. The median is a twelfth of
    `longest`, where generation stops; every fiftieth sample reaches it."""
    generator = random.Random(seed)
    drawn = (generator.lognormvariate(math.log(longest / 12), 1.2) for _ in range(num_samples))
    return [min(longest, 2 + round(length)) for length in drawn]


def in_order(lengths: list[int], num_ranks: int, most_tokens: int) -> Held:
    """Give each rank every num_ranks-th sample, and fill its micro-batches in order."""
    by_rank: list[list[list[int]]] = []
    for rank in range(num_ranks):
        by_rank.append([[]])
        for idx in range(rank, len(lengths), num_ranks):
            if lengths[idx] + sum(lengths[each] for each in by_rank[-1][-1]) > most_tokens:
                by_rank[-1].append([])
            by_rank[-1][-1].append(idx)
    return [list(each) for each in itertools.zip_longest(*by_rank, fillvalue=[])]


def by_squares(lengths: list[int], num_ranks: int, most_tokens: int) -> Held:
    squares = [length**2 for length in lengths]
    return sorted_micro_batches(lengths, squares, num_ranks, most_tokens)


def by_tokens(lengths: list[int], num_ranks: int, most_tokens: int) -> Held:
    return sorted_micro_batches(lengths, lengths, num_ranks, most_tokens)


WAYS = {  # how micro-batches are filled, and whether distca balances attention
    "in order": (in_order, False),
    "in order, distca": (in_order, True),
    "sorted by squares": (by_squares, False),
    "sorted by squares, distca": (by_squares, True),
    "sorted by tokens, distca": (by_tokens, True),
}


@dataclass(frozen=True)
class MicroBatch:
    """This rank's rows."""

    tokens: Tensor
    labels: Tensor
    advantages: Tensor  # float32, by token
    documents: distca.Documents


def micro_batch_of(held: list[int], lengths: list[int], seed: int, device) -> MicroBatch:
    """Make the samples `held`, whose tokens depend on the sample and the seed alone."""
    tokens, labels = ([torch.empty(0, dtype=torch.int64)] for _ in range(2))
    for idx in held:
        generator = torch.Generator().manual_seed(1000 * seed + idx)
        steps = torch.randint(1, 4, (lengths[idx],), generator=generator)
        tokens.append(steps.cumsum(0) % VOCAB_SIZE)
        labels.append(F.pad(tokens[-1][1:], (0, 1), value=IGNORE_INDEX))
    held_lengths = [lengths[idx] for idx in held]
    signs = torch.tensor([1.0 - 2.0 * (idx % 3 == 0) for idx in held])
    return MicroBatch(
        torch.cat(tokens).to(device),
        torch.cat(labels).to(device),
        signs.repeat_interleave(torch.tensor(held_lengths, dtype=torch.int64)).to(device),
        distca.Documents([0, *itertools.accumulate(held_lengths)]),
    )


def log_probs(model: Llama, batch: MicroBatch) -> Tensor:
    """Return the log-probability of each label, 0 where there is none."""
    with distca.documents(batch.documents):  # waits for their plan
        positions = batch.documents.position_ids.to(batch.tokens.device)
        logits = model(batch.tokens, positions, batch.documents)
    return -F.cross_entropy(logits.float(), batch.labels, reduction="none")


@torch.no_grad()
def pass_without_gradients(model: Llama, batches: list[MicroBatch]) -> list[Tensor]:
    return [log_probs(model, batch) for batch in batches]


def accumulate_gradients(
    model: Llama, batches: list[MicroBatch], before: list[Tensor], num_labels: int
) -> None:
    """Accumulate gradients of the policy's objective."""
    scale = dist.get_world_size() / num_labels  # FSDP averages gradients
    for batch, old in zip(batches, before, strict=True):
        ratios = (log_probs(model, batch) - old).exp()
        (-scale * (ratios * batch.advantages).sum()).backward()


def build_model(args: argparse.Namespace, device: torch.device) -> Llama:
    torch.manual_seed(args.seed)
    size = {name: value for name, value in SIZES[device.type].items() if name != "longest"}
    head_dim, ffn = size["hidden"] // size["heads"], size["hidden"] * 7 // 2
    config = LlamaConfig(vocab_size=VOCAB_SIZE, head_dim=head_dim, ffn=ffn, **size)
    with device:
        model = Llama(config, distca.core_attention)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=precision)
    return fully_shard(model, mesh=mesh, mp_policy=precision)


@dataclass
class Outcome:
    """All steps of one way."""

    num_micro_batches: float  # mean over steps
    most_tokens: int
    imbalance: float
    """Sum of squared lengths: of the slowest rank over the mean, over all micro-batches."""
    step_ms: float
    no_grad_ms: float  # of the step's pass without gradients
    log_prob: float  # mean over the labels of the last step


def train(args: argparse.Namespace, device: torch.device, way: str) -> Outcome:
    fill, is_balanced = WAYS[way]
    distca.init(options=distca.Options(enabled=is_balanced, balance_no_grad=True))
    model = build_model(args, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    milliseconds, counts, most, slowest, total = [], [], 0, 0, 0
    no_grad_milliseconds = []
    for step in range(args.steps):
        lengths = lengths_of_step(args.samples, args.longest, args.seed + step)
        held = fill(lengths, num_ranks, args.most_tokens)
        for each in held:
            squares = [sum(lengths[idx] ** 2 for idx in samples) for samples in each]
            slowest, total = slowest + num_ranks * max(squares), total + sum(squares)
            most = max(most, *(sum(lengths[idx] for idx in samples) for samples in each))
        batches = [micro_batch_of(each[rank], lengths, args.seed + step, device) for each in held]
        for batch in batches if is_balanced else ():
            distca.plan(batch.documents, device=device, ahead=True)
        num_labels = sum(lengths) - len(lengths)
        dist.barrier()
        start = time.perf_counter()
        before = pass_without_gradients(model, batches)
        log_prob = torch.stack([each.sum() for each in before]).sum() / num_labels
        dist.all_reduce(log_prob)
        last = log_prob.item()  # waits for all ranks' devices
        no_grad_milliseconds.append(1e3 * (time.perf_counter() - start))
        accumulate_gradients(model, batches, before, num_labels)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if device.type == "cuda":
            torch.cuda.synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - start))
        counts.append(len(held))
    distca.close()
    step_ms, no_grad_ms = (
        statistics.median(each[1:]) for each in (milliseconds, no_grad_milliseconds)
    )
    return Outcome(statistics.fmean(counts), most, slowest / total, step_ms, no_grad_ms, last)


def show(outcomes: dict[str, Outcome]) -> str | None:
    """Print the table. Return an error if the ways differ in more than rounding on the CPU."""
    print(
        f"{'way':<28}{'micro-batches':>14}{'most tokens':>13}{'imbalance':>11}{'step ms':>10}"
        f"{'no-grad ms':>12}{'log-probability':>17}"
    )
    for way, each in outcomes.items():
        print(
            f"{way:<28}{each.num_micro_batches:>14.1f}{each.most_tokens:>13}"
            f"{each.imbalance:>11.2f}{each.step_ms:>10.1f}"
            f"{each.no_grad_ms:>12.1f}{each.log_prob:>17.5f}"
        )
    print("imbalance: squared lengths, slowest rank / mean, which distca then balances")
    print("no-grad: the pass that computes log-probabilities before training, part of the step")
    values = [each.log_prob for each in outcomes.values()]
    difference = max(values) - min(values)
    print(f"largest difference of log-probabilities {difference:.1e}")
    if torch.cuda.is_available() or difference <= LARGEST_FLOAT32_DIFFERENCE:
        return None
    return f"log-probabilities differ by {difference:.1e}; expected rounding of float32"


def main() -> None:
    args = arguments()
    if args.write is not None:
        seeds = range(args.seed, args.seed + args.steps)
        drawn = [lengths_of_step(args.samples, args.longest, seed) for seed in seeds]
        args.write.write_text(json.dumps(sum(drawn, [])) + "\n")
        return
    device = torch.device("cpu")
    if args.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    outcomes = {way: train(args, device, way) for way in WAYS}
    failure = show(outcomes) if dist.get_rank() == 0 else None
    gc.collect()  # FSDP's cycles would keep the group and gloo's threads alive until exit
    dist.destroy_process_group()
    sys.exit(failure)


if __name__ == "__main__":
    main()
