"""Time steps of a pipeline of Llama-wide blocks: torch's 1F1B, and stages that share attention.

    torchrun --nproc-per-node 2 benchmarks/pipeline_step.py --lengths lengths.json --layers 8

"1F1B" is torch's schedule with distca's kernels, and each rank computes its own attention. In
"stages", each stage balances attention over its data parallel ranks. In "pool", all stages share
attention (distca.integrations.pipelining.SchedulePooled). All variants train on the same documents
and tokens, from the same initial weights. --layers counts the layers of all stages. A step covers
the forward and backward passes of all micro-batches, and the optimizer. The host times it from
barrier to barrier, with the device synchronised.

distca.simulate draws the same documents. Pass 1F1B's step time as MS to predict the other
schedules, and also pass --recompute if the steps were run with --checkpoint:

    python -m distca.simulate --lengths lengths.json --ranks 2 --pp 2 --model 8B --layers 8 \\
        --vocab 8192 --micro-batches 8 --skip 2 --steps 6 --fit-step-ms MS
"""

import argparse
import itertools
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from device_time import gathered, timed
from step_loop import free_memory, join, leave
from step_model import (
    add_model_arguments,
    check_device,
    dtype_of,
    mixed_precision,
    new_model,
)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from workloads import Workload, add_arguments, make_rows, make_workload

import distca
from distca.integrations.pipelining import SchedulePooled

# From examples/, which step_model puts on the path.
from llama import LlamaStage  # isort: skip
from pipeline import InOrder, one_f_one_b  # isort: skip

NUM_WARM_UP_STEPS = 2
VARIANTS = ("1F1B", "stages", "pool")


@dataclass
class Run:
    """Results of a variant: times of the slowest rank, memory of the fullest."""

    step_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak_gib: float = 0.0
    imbalance: tuple[float, float] | None = None  # means over plans, before and after balancing

    @property
    def mean_ms(self) -> float:
        return statistics.fmean(self.step_ms[NUM_WARM_UP_STEPS:])


def arguments() -> tuple[argparse.Namespace, Workload]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    add_model_arguments(parser)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument(
        "--micro-batches", type=int, default=8, help="per data parallel rank and step"
    )
    parser.add_argument("--max-in-flight", type=int, help="limit on micro-batches in the pool")
    parser.add_argument("--steps", type=int, default=8, help=f"{NUM_WARM_UP_STEPS} are warm-up")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    args = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", 0))
    if world_size == 0:
        parser.error("start it with torchrun: torchrun --nproc-per-node 2 " + __file__)
    if args.stages < 2 or world_size % args.stages or args.layers % args.stages:
        parser.error(
            f"--stages is {args.stages}; expected at least 2, and a divisor of the {world_size} "
            f"ranks and of the {args.layers} layers"
        )
    if args.steps <= NUM_WARM_UP_STEPS:
        parser.error(f"--steps is {args.steps}; needs more than {NUM_WARM_UP_STEPS} warm-up steps")
    if args.document is not None or args.mixed is not None:
        parser.error("documents would cross ranks; expected --lengths without --mixed, or --equal")
    num_packs = world_size // args.stages * args.micro_batches
    try:
        workload = make_workload(args, num_packs, args.steps)
        check_device(args)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return args, workload


def build_stage(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> LlamaStage:
    model, precision = new_model(args, device, distca.core_attention), mixed_precision(device)
    num_layers, index = args.layers // args.stages, mesh["pp"].get_local_rank()
    stage = LlamaStage(model, num_layers * index, num_layers * (index + 1))
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["dp"], mp_policy=precision)
    return fully_shard(stage, mesh=mesh["dp"], mp_policy=precision)


class Trainer:
    """Trains this rank's stage from the initial weights, under one of VARIANTS."""

    def __init__(
        self,
        args: argparse.Namespace,
        workload: Workload,
        mesh: DeviceMesh,
        device: torch.device,
        variant: str,
    ) -> None:
        self.args, self.workload, self.mesh, self.device = args, workload, mesh, device
        self.variant, self.loss_scale = variant, 1.0
        index = mesh["pp"].get_local_rank()
        self.is_first, self.is_last = index == 0, index == args.stages - 1
        stage = build_stage(args, mesh, device)
        self.optimizer = torch.optim.AdamW(
            stage.parameters(), lr=args.learning_rate, fused=device.type == "cuda"
        )
        self.in_order = InOrder(stage)
        settings = {"loss_fn": self._loss, "scale_grads": False}
        if variant == "pool":
            own = PipelineStage(stage, index, args.stages, device, group=mesh.get_group("pp"))
            self.schedule = SchedulePooled(
                own,
                args.micro_batches,
                max_in_flight=args.max_in_flight,
                recompute=args.checkpoint,
                **settings,
            )
            return
        sizes = (workload.tokens, args.hidden, args.vocab)
        self.schedule = one_f_one_b(
            self.in_order, mesh, sizes, dtype_of(device), args.micro_batches, **settings
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.loss_scale * F.cross_entropy(logits.float(), labels, reduction="sum")

    def micro_batches(self, step: int) -> Iterator[tuple[distca.Documents, range]]:
        """Yield the documents and the row range of each of this rank's micro-batches."""
        place, num_places = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        packs = self.workload.packs[step]
        for index in range(place, len(packs), num_places):
            documents = distca.Documents([0, *itertools.accumulate(packs[index])])
            yield documents, self.workload.rows_of(step, index)

    def step(self, step: int) -> Tensor:
        """Train one step. Return the sum of this rank's losses."""
        rows = make_rows(self.workload, step, self.args.vocab, self.args.seed, self.device)
        documents, ranges = zip(*self.micro_batches(step), strict=True)
        own = torch.cat([torch.arange(each.start, each.stop) for each in ranges])
        rows = rows.chosen(own.to(self.device))
        num_labels = self.workload.num_tokens - len(self.workload.lengths(step))
        self.loss_scale = self.mesh["dp"].size() / num_labels
        inputs = [rows.tokens] * self.is_first
        losses: list[Tensor] = []
        keywords = {"return_outputs": False}
        if self.is_last:
            keywords |= {"target": rows.labels, "losses": losses}
        if self.variant == "pool":
            self.schedule.step(*inputs, documents=documents, **keywords)
        else:
            if self.variant == "stages":
                for each in documents:
                    distca.plan(each, group=self.mesh["dp"], device=self.device)
            self.in_order.documents = iter(documents)
            self.schedule.step(*inputs, **keywords)
        self.optimizer.step()
        self.optimizer.zero_grad()
        zero = torch.zeros((), device=self.device)
        return torch.stack(losses).detach().sum() if losses else zero


def run_variant(
    args: argparse.Namespace,
    workload: Workload,
    mesh: DeviceMesh,
    device: torch.device,
    variant: str,
) -> Run:
    options = distca.Options(enabled=variant != "1F1B", keep_inputs_gb=args.keep_inputs_gb)
    distca.init(mesh["pp", "dp"] if variant == "pool" else mesh["dp"], options=options)
    trainer, run = Trainer(args, workload, mesh, device, variant), Run()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for step in range(args.steps):
        ms, loss_sum = timed(lambda step=step: trainer.step(step), device)
        run.step_ms.append(ms)
        run.losses.append(loss_sum / mesh["dp"].size())
    if device.type == "cuda":
        run.peak_gib = max(gathered(torch.cuda.max_memory_allocated() / 2**30, device))
    if variant == "pool":
        reports = [report for _, report in trainer.schedule.reports()]
        run.imbalance = tuple(
            statistics.fmean(getattr(each, f"imbalance_{when}") for each in reports)
            for when in ("before", "after")
        )
    distca.close()
    return run


def main() -> None:
    args, workload = arguments()
    device = join(args.device)
    shape = (args.stages, dist.get_world_size() // args.stages)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp"))
    runs = {}
    for variant in args.variants:
        runs[variant] = run = run_variant(args, workload, mesh, device, variant)
        free_memory(device)
        if dist.get_rank() == 0:
            line = f"{variant:8} {run.mean_ms:10.1f} ms a step  peak {run.peak_gib:6.1f} GiB"
            line += f"  loss {run.losses[0]:.4f} -> {run.losses[-1]:.4f}"
            if run.imbalance is not None:
                line += "  imbalance of the last step's plans {:.2f} -> {:.2f}".format(
                    *run.imbalance
                )
            print(line, flush=True)
    if dist.get_rank() == 0 and "1F1B" in runs:
        for variant, run in runs.items():
            print(f"{variant}: {runs['1F1B'].mean_ms / run.mean_ms:.3f} times as fast as 1F1B")
    leave()


if __name__ == "__main__":
    main()
