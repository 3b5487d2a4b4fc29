"""One training step of a small Llama in a pipeline whose stages share attention, and the same step
in one process."""

import functools
import itertools
import time
from dataclasses import dataclass, field

import oracle
import parallel_training as training
import torch
import torch.distributed as dist
from llama import LlamaStage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.nn.parallel import DistributedDataParallel
from uneven_training import whole

import distca
from distca.integrations.pipelining import SchedulePooled

TOKENS = 64  # of a micro-batch
CAUSAL, WINDOW = (-1, 0), (6, 0)


@dataclass(frozen=True)
class Pipeline:
    """A model, and how a schedule runs it on the ranks of a mesh."""

    layers: tuple[int, ...] = (3, 2)  # of each stage
    num_micro_batches: int = 4
    windows: tuple[tuple[int, int], ...] = (CAUSAL,)  # of layers, by turns
    wrapper: str = "FSDP2"
    recompute: bool = False
    options: dict = field(default_factory=dict)  # of the schedule
    num_stage_ranks: int = 2
    device: str = "cpu"
    attention_dtype: torch.dtype = torch.float32  # the model around attention is float32
    examples: dict | None = None  # keywords of the tensors in input_args and output_args


def lengths_of(place: int, index: int) -> list[int]:
    """Return the lengths of documents in a micro-batch of a data parallel rank: odd, and few long
    documents on rank 0."""
    first = [41, 1, 17] if place == 0 else [3, 9, 2, 11, 4, 5, 7]
    first = [each + (index * 5 + i) % 3 for i, each in enumerate(first)]
    return [*first, TOKENS - sum(first)]


def micro_batch(place: int, index: int) -> tuple[Tensor, Tensor, list[int]]:
    """Return tokens, labels and lengths."""
    generator = torch.Generator().manual_seed(100 * place + index)
    tokens = torch.randint(0, training.SIZES["vocab_size"], (TOKENS,), generator=generator)
    lengths = lengths_of(place, index)
    return tokens, training.labels_of(tokens, lengths), lengths


def build(case: Pipeline, attend) -> nn.Module:
    """`attend(q, k, v, documents, window_size=...)` computes attention."""

    def cast(q: Tensor, k: Tensor, v: Tensor, *arguments, **keywords) -> Tensor:
        rows = (each.to(case.attention_dtype) for each in (q, k, v))
        return attend(*rows, *arguments, **keywords).to(q.dtype)

    training_sizes = training.SIZES | {"layers": sum(case.layers)}
    with_sizes = dict(training_sizes, ffn=48, recompute=case.recompute)
    torch.manual_seed(0)
    model = training.Llama(training.LlamaConfig(**with_sizes), cast)
    windows = itertools.cycle(case.windows)
    with torch.no_grad():
        for block in model.blocks:
            block.attention.core_attention = functools.partial(cast, window_size=next(windows))
            for linear in (block.attention.wq, block.attention.wk):
                linear.weight.mul_(20)
    return model


def by_document(q: Tensor, k: Tensor, v: Tensor, documents, window_size) -> Tensor:
    rows = zip(*(each.split(documents.lengths) for each in (q, k, v)), strict=True)
    return torch.cat([oracle.attention(*each, window_size)[0] for each in rows])


def num_predicted(case: Pipeline, num_places: int) -> int:
    places = itertools.product(range(num_places), range(case.num_micro_batches))
    return sum(int((micro_batch(*each)[1] >= 0).sum()) for each in places)


@functools.cache
def true_step(
    layers: int,
    windows: tuple,
    num_micro_batches: int,
    num_places: int,
    attention_dtype: torch.dtype = torch.float32,
) -> tuple[float, dict[str, Tensor]]:
    """Run all micro-batches one after the other on the CPU. Return the loss and gradients."""
    case = Pipeline((layers,), num_micro_batches, windows, attention_dtype=attention_dtype)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors are small
    model, total = build(case, by_document), 0.0
    for each in itertools.product(range(num_places), range(case.num_micro_batches)):
        tokens, labels, lengths = micro_batch(*each)
        documents = training.WholeDocuments.of(lengths, torch.device("cpu"))
        loss = training.loss_sum(model(tokens, documents.position_ids, documents), labels)
        loss = loss / num_predicted(case, num_places)
        loss.backward()
        total += loss.item()
    torch.set_num_threads(num_threads)
    return total, {name: each.grad for name, each in model.named_parameters()}


def errors_of(loss: float | None, gradients: dict, truth: tuple) -> dict[str, float]:
    """Return the relative errors of a loss, if there is one, and of gradients, by name."""
    true_loss, true_gradients = truth
    errors = {} if loss is None else {"loss": abs(loss - true_loss) / true_loss}
    for name, gradient in gradients.items():
        expected = true_gradients[name]
        errors[name] = ((gradient - expected).norm() / expected.norm()).item()
    return errors


def wrap(stage: nn.Module, case: Pipeline, mesh: DeviceMesh) -> nn.Module:
    if case.wrapper == "DDP":
        return DistributedDataParallel(stage, process_group=mesh.get_group())
    reshards = not case.options.get("split_backward", False)
    for block in stage.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(stage, mesh=mesh, reshard_after_forward=reshards)


def examples_of(case: Pipeline, index: int) -> dict:
    """Return input_args and output_args, so that PipelineStage need not infer them."""
    if case.examples is None:
        return {}
    tokens = torch.zeros(TOKENS, dtype=torch.int64, device=case.device)
    hidden, logits = (
        torch.zeros(TOKENS, training.SIZES[name], device=case.device, **case.examples)
        for name in ("hidden", "vocab_size")
    )
    is_last = index == len(case.layers) - 1
    return {
        "input_args": tokens if index == 0 else hidden,
        "output_args": logits if is_last else hidden,
    }


@functools.cache  # process groups stay until torch.distributed ends
def open_mesh(device: str, *shape: int) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=("pp", "dp"))


def open_pipeline(case: Pipeline, world_size: int, attend=distca.core_attention, loss=None):
    """Return the mesh, this rank's stages by index and the schedule."""
    mesh = open_mesh(case.device, case.num_stage_ranks, world_size // case.num_stage_ranks)
    distca.init(mesh["pp", "dp"])
    model = build(case, attend).to(case.device)
    ends = [0, *itertools.accumulate(case.layers)]
    parts, stages = {}, []
    for index in range(mesh["pp"].get_local_rank(), len(case.layers), case.num_stage_ranks):
        parts[index] = wrap(LlamaStage(model, *ends[index : index + 2]), case, mesh["dp"])
        arguments = {"group": mesh.get_group("pp"), **examples_of(case, index)}
        place = (index, len(case.layers), torch.device(case.device))
        stages.append(PipelineStage(parts[index], *place, **arguments))
    num_places = mesh["dp"].size()
    scale = num_places / num_predicted(case, num_places)
    schedule = SchedulePooled(
        stages,
        case.num_micro_batches,
        loss or (lambda logits, labels: training.loss_sum(logits, labels) * scale),
        scale_grads=False,
        recompute=case.recompute,
        **case.options,
    )
    return mesh, parts, schedule


def run_step(
    case: Pipeline, mesh: DeviceMesh, parts: dict, schedule: SchedulePooled, **settings
) -> list:
    """Return the losses of a step, on the last stage."""
    place = mesh["dp"].get_local_rank()
    batches = [micro_batch(place, index) for index in range(case.num_micro_batches)]
    documents = [distca.Documents([0, *itertools.accumulate(each[2])]) for each in batches]
    tokens, labels = (torch.cat([each[i] for each in batches]).to(case.device) for i in range(2))
    losses: list[Tensor] = []
    arguments = [tokens] if 0 in parts else []
    targets = {"target": labels, "losses": losses} if len(case.layers) - 1 in parts else {}
    schedule.step(*arguments, documents=documents, **targets, **settings)
    return losses


def gradients_of(parts: dict) -> dict[str, Tensor]:
    return {
        name.removeprefix("module."): whole(each.grad).cpu()
        for part in parts.values()
        for name, each in part.named_parameters()
    }


def train_step(rank: int, world_size: int, case: Pipeline, num_steps: int = 2) -> tuple:
    """Return the loss (None without the last stage), gradients of the last step, and the bytes that
    its plans moved."""
    mesh, parts, schedule = open_pipeline(case, world_size)
    try:
        for _ in range(num_steps):
            for part in parts.values():
                part.zero_grad()
            losses = run_step(case, mesh, parts, schedule)
        loss = torch.stack(losses).detach().sum() if losses else None
        if loss is not None:
            dist.all_reduce(loss, group=mesh.get_group("dp"))
            loss = loss.item() / mesh["dp"].size()
        bytes_moved = sum(sum(report.bytes_out) for _, report in schedule.reports())
        return loss, gradients_of(parts), bytes_moved
    finally:
        distca.close()


def timed_step(
    rank: int, world_size: int, case: Pipeline, folder: str, slow_rank: int, seconds: float
) -> list[tuple[str, list[float]]]:
    """Run two steps, and time the first. Each call of attention on `slow_rank` is delayed by
    `seconds`. For each plan of the first step, return its tick and its predicted seconds."""

    def attend(q: Tensor, *arguments, **keywords) -> Tensor:
        time.sleep(seconds if rank == slow_rank else 0.0)
        return distca.core_attention(q, *arguments, **keywords)

    distca.close()
    distca.configure(distca.Options(), distca.Watching(log_every=2, run_dir=folder))
    mesh, parts, schedule = open_pipeline(case, world_size, attend)
    try:
        run_step(case, mesh, parts, schedule)
        plans = [(name, report.seconds_after) for name, report in schedule.reports()]
        if case.device == "cuda":
            torch.cuda.synchronize()  # so that the next step can save the times of this one
        run_step(case, mesh, parts, schedule)
        return plans
    finally:
        dist.barrier()
        distca.close()
        distca.configure(distca.Options())


def accumulate(rank: int, world_size: int, case: Pipeline) -> dict[str, Tensor]:
    """Return the gradients of two steps, reduced over ranks once at the end."""
    mesh, parts, schedule = open_pipeline(case, world_size)
    try:
        for is_last in (False, True):
            run_step(case, mesh, parts, schedule, finalize_gradients=is_last)
        return gradients_of(parts)
    finally:
        distca.close()
