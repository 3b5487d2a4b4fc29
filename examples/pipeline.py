"""Train a small Llama in a pipeline whose stages share attention.

    torchrun --nproc-per-node 4 examples/pipeline.py --steps 20 --compare stages

Half of the ranks hold each of two stages, under FSDP2; --stages sets another number. The script
runs on the CPU (gloo, float32) and on CUDA devices (NCCL, bfloat16). With --compare it trains twice
from one seed, first with torch's Schedule1F1B: `stages` balances attention in each stage apart,
`none` does not balance it. It reports the speed of both and the largest loss difference.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, LlamaConfig, LlamaStage
from stdlib_corpus import VOCAB_SIZE, Corpus, Pack
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import distca
from distca.integrations.pipelining import SchedulePooled

SIZES = {
    "cpu": {"tokens": 2048, "hidden": 64, "layers": 5, "heads": 4, "kv_heads": 2},
    "cuda": {"tokens": 16384, "hidden": 2048, "layers": 8, "heads": 16, "kv_heads": 4},
}
LARGEST_FLOAT32_DIFFERENCE = 1e-4  # of two losses that differ only in summation order


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compare", choices=["stages", "none"], help="train with 1F1B as well")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=6, help="of each data parallel rank")
    parser.add_argument("--max-in-flight", type=int, help="micro-batches in the pipeline at a time")
    parser.add_argument("--split-backward", action="store_true", help="weights' gradients later")
    parser.add_argument("--checkpoint", action="store_true", help="activation checkpointing")
    parser.add_argument("--tokens", type=int, help="of a micro-batch; 2048 on CPU, 16384 on CUDA")
    parser.add_argument("--layers", type=int, help="5 on CPU, 8 on CUDA")
    parser.add_argument("--hidden", type=int, help="64 on CPU, 2048 on CUDA")
    parser.add_argument("--heads", type=int, help="4 on CPU, 16 on CUDA")
    parser.add_argument("--kv-heads", type=int, help="2 on CPU, 4 on CUDA")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("start it with torchrun: torchrun --nproc-per-node 4 examples/pipeline.py ...")
    args.device_type = "cuda" if torch.cuda.is_available() else "cpu"
    for name, size in SIZES[args.device_type].items():
        if getattr(args, name) is None:
            setattr(args, name, size)
    args.dtype = torch.bfloat16 if args.device_type == "cuda" else torch.float32
    return args


class InOrder(nn.Module):
    """A stage of torch's schedule, which runs micro-batches in order. torch passes the same keyword
    arguments to all of them."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage
        self.documents: Iterator[distca.Documents] = iter(())

    def forward(self, x: Tensor) -> Tensor:
        return self.stage(x, next(self.documents))


def one_f_one_b(
    stage: InOrder,
    mesh: DeviceMesh,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    num_micro_batches: int,
    **settings,
) -> Schedule1F1B:
    """Return torch's schedule of a stage for each rank of mesh["pp"]. `sizes` are the tokens of a
    micro-batch, the hidden size and the vocabulary's."""
    index, num_stages = mesh["pp"].get_local_rank(), mesh["pp"].size()
    num_tokens, *widths = sizes
    device = next(stage.parameters()).device
    tokens = torch.empty(num_tokens, dtype=torch.int64, device=device)
    like = {"dtype": dtype, "device": device, "requires_grad": True}  # gradients travel too
    hidden, logits = (torch.empty(num_tokens, width, **like) for width in widths)
    own = PipelineStage(
        stage,
        index,
        num_stages,
        device,
        input_args=tokens if index == 0 else hidden,
        output_args=logits if index == num_stages - 1 else hidden,
        group=mesh.get_group("pp"),
    )
    return Schedule1F1B(own, num_micro_batches, **settings)


def build_stage(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> LlamaStage:
    """Return this rank's stage. The first stages have a layer more if layers do not divide."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden=args.hidden,
        layers=args.layers,
        heads=args.heads,
        kv_heads=args.kv_heads,
        head_dim=args.hidden // args.heads,
        ffn=args.hidden * 7 // 2,
        recompute=args.checkpoint,
    )
    with device:
        model = Llama(config, distca.core_attention)
    index = mesh["pp"].get_local_rank()
    first, last = (-(-args.layers * each // args.stages) for each in (index, index + 1))
    stage = LlamaStage(model, first, last)
    precision = MixedPrecisionPolicy(param_dtype=args.dtype, reduce_dtype=torch.float32)
    reshards = not args.split_backward
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh["dp"], mp_policy=precision, reshard_after_forward=reshards)
    return fully_shard(stage, mesh=mesh["dp"], mp_policy=precision, reshard_after_forward=reshards)


def steps_of(args: argparse.Namespace, mesh: DeviceMesh) -> Iterator[tuple[list[Pack], float]]:
    """Yield the micro-batches of this rank's pipeline, and the factor of their losses' sum."""
    place, num_places = mesh["dp"].get_local_rank(), mesh["dp"].size()
    corpus = Corpus(0, context=args.tokens)
    for _ in range(args.steps):
        packs = [corpus.next_pack(args.tokens) for _ in range(num_places * args.micro_batches)]
        yield packs[place::num_places], num_places / sum(each.num_predicted for each in packs)


def train(
    args: argparse.Namespace, mesh: DeviceMesh, device: torch.device, pooled: bool
) -> tuple[list[float], list[float]]:
    """Return the loss and seconds of each step."""
    index = mesh["pp"].get_local_rank()
    is_first, is_last = index == 0, index == args.stages - 1
    stage, scale = build_stage(args, mesh, device), 1.0
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-3)

    def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
        return scale * F.cross_entropy(logits.float(), labels, reduction="sum")

    settings = {"loss_fn": loss_of, "scale_grads": False}
    if pooled:
        in_order = None
        schedule = SchedulePooled(
            PipelineStage(stage, index, args.stages, device, group=mesh.get_group("pp")),
            args.micro_batches,
            max_in_flight=args.max_in_flight,
            split_backward=args.split_backward,
            recompute=args.checkpoint,
            **settings,
        )
    else:
        in_order, sizes = InOrder(stage), (args.tokens, args.hidden, VOCAB_SIZE)
        schedule = one_f_one_b(in_order, mesh, sizes, args.dtype, args.micro_batches, **settings)

    all_losses, all_seconds = [], []
    for step, (packs, step_scale) in enumerate(steps_of(args, mesh)):
        scale, start = step_scale, time.perf_counter()
        documents = [distca.Documents([0, *itertools.accumulate(p.lengths)]) for p in packs]
        losses: list[Tensor] = []
        inputs = [torch.cat([each.tokens.long() for each in packs]).to(device)] * is_first
        keywords = {"return_outputs": False}
        if is_last:
            labels = torch.cat([each.labels() for each in packs]).to(device)
            keywords |= {"target": labels, "losses": losses}
        if pooled:
            schedule.step(*inputs, documents=documents, **keywords)
        else:
            if args.compare == "stages":
                for each in documents:
                    distca.plan(each, group=mesh["dp"], device=device)
            in_order.documents = iter(documents)
            schedule.step(*inputs, **keywords)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().sum() if is_last else torch.zeros((), device=device)
        dist.all_reduce(loss)
        all_losses.append(loss.item() / mesh["dp"].size())  # waits for the device
        all_seconds.append(time.perf_counter() - start)
        show(args, "pooled" if pooled else "1F1B", step, all_losses[-1], schedule)
    return all_losses, all_seconds


def show(args: argparse.Namespace, name: str, step: int, loss: float, schedule) -> None:
    if dist.get_rank() != 0:
        return
    line = f"{name:6}  step {step + 1:3}/{args.steps}  loss {loss:.4f}"
    if isinstance(schedule, SchedulePooled):
        reports = [report for _, report in schedule.reports()]
        before, after = (
            statistics.fmean(getattr(each, f"imbalance_{name}") for each in reports)
            for name in ("before", "after")
        )
        line += f"  imbalance of {len(reports)} plans {before:.2f} -> {after:.2f}"
    print(line, flush=True)


def main() -> None:
    args = arguments()
    device = torch.device("cpu")
    if args.device_type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    shape = (args.stages, dist.get_world_size() // args.stages)
    mesh = init_device_mesh(args.device_type, shape, mesh_dim_names=("pp", "dp"))
    reference = None
    if args.compare is not None:
        distca.init(mesh["dp"])
        reference = train(args, mesh, device, pooled=False)
        distca.close()
    distca.init(mesh["pp", "dp"])
    losses, seconds = train(args, mesh, device, pooled=True)
    failure = None
    if reference is not None:
        before, after = (statistics.median(each) for each in (reference[1], seconds))
        difference = max(abs(a - b) for a, b in zip(losses, reference[0], strict=True))
        if dist.get_rank() == 0:
            print(f"1F1B {before:.3f} s, pooled {after:.3f} s a step (median)")
            print(f"largest loss difference {difference:.2e}")
        if args.dtype == torch.float32 and difference > LARGEST_FLOAT32_DIFFERENCE:
            failure = f"expected a loss difference of at most {LARGEST_FLOAT32_DIFFERENCE:.0e}"
    distca.close()
    dist.destroy_process_group()
    sys.exit(failure)


if __name__ == "__main__":
    main()
