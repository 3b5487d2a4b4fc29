"""Steps of torchtitan's trainer in pipelines of its small Llama, on gloo ranks.

torchtitan 0.3.0 needs a newer torch than 2.11 for its pipelines. This module adds what torch 2.11
lacks. Stages take `get_mesh`, which only DTensors between stages need. Schedules take lists.
"""

import contextlib
import functools
import inspect
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass, field

import titan_model as tm
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torchtitan.distributed import pipeline_parallel
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

import distca
import distca.integrations.torchtitan as integration
from distca._torch_private import drop_other_inputs, parts_of
from distca.integrations import torchtitan_pipelines as pipelines
from distca.integrations.pipelining import SchedulePooled

NUM_STAGE_RANKS, NUM_MICRO_BATCHES = 2, 4


@dataclass(frozen=True)
class Case:
    schedule: str = "1F1B"
    is_pooled: bool = True
    checkpointing: str = "selective"
    backend: str = "partial_dtensor"  # FSDP of torch 2.11 supports no other
    options: dict = field(default_factory=dict)  # of `pooled`

    @property
    def num_layers(self) -> int:
        return 5 if self.schedule == "1F1B" else 6  # uneven stages, the last one without attention


class Stage(PipelineStage):
    """PipelineStage with the arguments of a newer torch."""

    def __init__(self, *args, get_mesh=None, **keywords) -> None:
        super().__init__(*args, **keywords)

    def forward_one_chunk(self, index: int, *args, **keywords):
        output = super().forward_one_chunk(index, *args, **keywords)
        drop_other_inputs(self, index)  # attention metadata also has numbers
        return output


def step_in_lists(
    schedule,
    *,
    kwarg_mbs: list,
    arg_mbs: list | None = None,
    target_mbs: list | None = None,
    losses: list | None = None,
    loss_kwargs: dict | None = None,
    return_outputs: bool = False,
    target: None = None,
) -> None:
    """Stand in for `step` of a newer torch's schedules."""
    stages, _, plain = parts_of(schedule)
    for stage in stages:
        stage.has_backward = schedule._has_backward
        stage.clear_runtime_states()
    arguments = (arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs)
    if isinstance(schedule, SchedulePooled):
        schedule._step_microbatches(*arguments, loss_kwargs)
        return
    schedule._loss_fn = functools.partial(plain, **(loss_kwargs or {}))
    schedule._step_microbatches(*arguments)
    schedule._loss_fn = plain


@contextlib.contextmanager
def newer_pipelines() -> Iterator[None]:
    """Add interfaces that torchtitan needs if this torch lacks them."""
    with contextlib.ExitStack() as patches:
        if "get_mesh" not in inspect.signature(PipelineStage).parameters:
            patch = unittest.mock.patch.object(pipeline_parallel, "PipelineStage", Stage)
            patches.enter_context(patch)
        for base in (PipelineScheduleSingle, PipelineScheduleMulti):
            if "arg_mbs" not in inspect.signature(base.step).parameters:
                patches.enter_context(unittest.mock.patch.object(base, "step", step_in_lists))
        yield


def row(place: int, index: int) -> tm.Batch:
    """Return a data parallel rank's micro-batch of one row. Rank 0 has the long documents."""
    lengths = [128 - 9 * index, 9 * index] if place == 0 else [3 + index] * 12
    lengths = [each for each in lengths if each]
    rest = tm.SEQ_LEN - sum(lengths)
    return tm.Batch.of([lengths + [rest] * (rest > 0)], seed=10 * index + place)


@functools.cache
def true_step(num_layers: int, num_places: int) -> tuple[float, dict[str, torch.Tensor]]:
    places = [(place, index) for place in range(num_places) for index in range(NUM_MICRO_BATCHES)]
    rows = [row(*each) for each in places]
    names = ("tokens", "labels", "positions")
    whole = tm.Batch(*(torch.cat([getattr(each, name) for each in rows]) for name in names))
    return tm.own_step(whole, num_layers)


def parallelize(parallelize_fn, model: torch.nn.Module, **arguments) -> torch.nn.Module:
    """Let FSDP sum gradients without scaling them, because gloo cannot scale."""
    model = parallelize_fn(model, **arguments)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def trainer_of(case: Case, dp: int) -> Trainer:
    """Return a trainer that has only what a step needs."""
    dims = tm.mesh_of(dp, 1, case.backend, NUM_STAGE_RANKS)
    model, config = tm.build(tm.OVERRIDES, num_layers=case.num_layers)
    config.loss = config.loss.loss_fn  # the chunked loss crashes torch 2.11 under FSDP
    config.training.local_batch_size = NUM_MICRO_BATCHES
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = case.backend
    config.parallelism.pipeline_parallel_degree = NUM_STAGE_RANKS
    config.parallelism.pipeline_parallel_schedule = case.schedule
    if case.checkpointing == "full":
        config.activation_checkpoint = FullAC.Config()
    elif case.checkpointing == "none":
        config.activation_checkpoint = None
    if case.is_pooled:
        pipelines.pooled(config, **case.options)
    integration.open_session(dims)  # as the override `metrics` does
    trainer = object.__new__(Trainer)
    trainer.config, trainer.parallel_dims, trainer.device = config, dims, torch.device("cpu")
    trainer.model_config, trainer.ntokens_seen = config.model_spec.model, 0
    trainer.train_context = contextlib.nullcontext
    trainer.loss_fn = config.loss.build(compile_config=config.compile)
    (
        trainer.pp_schedule,
        trainer.model_parts,
        trainer.pp_has_first_stage,
        trainer.pp_has_last_stage,
    ) = config.model_spec.pipelining_fn(
        model,
        parallel_dims=dims,
        training=config.training,
        parallelism=config.parallelism,
        compile_config=config.compile,
        ac_config=config.activation_checkpoint,
        dump_folder="",
        device=trainer.device,
        model_config=trainer.model_config,
        parallelize_fn=functools.partial(parallelize, config.model_spec.parallelize_fn),
        loss_fn=trainer.loss_fn,
    )
    return trainer


@newer_pipelines()
def train(rank: int, world_size: int, case: Case) -> tuple[float, float]:
    """Take two steps, and validate if stages are pooled. Return the worst error of losses and
    gradients, and the megabytes that plans moved."""
    distca.close()
    dp = world_size // NUM_STAGE_RANKS
    try:
        with unittest.mock.patch.object(integration.BalancedAttention, "axes", ["batch"]):
            trainer = trainer_of(case, dp)
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        place = 0 if mesh is None else mesh.get_local_rank()
        batches = [row(place, index) for index in range(NUM_MICRO_BATCHES)]
        inputs = [{"input": each.tokens, "positions": each.positions} for each in batches]
        labels = [each.labels for each in batches]
        num_tokens = torch.tensor(dp * NUM_MICRO_BATCHES * tm.SEQ_LEN)
        integration.recent_figures()
        for _ in range(2):
            for part in trainer.model_parts:
                part.zero_grad()
            losses = [
                trainer.pp_forward_backward_step(
                    input_dict_mbs=inputs, label_mbs=labels, global_valid_tokens=num_tokens
                )
            ]
        moved = integration.recent_figures()["moved_mb"]
        own = {}
        for part in trainer.model_parts:
            own |= tm.gradients(part)
        if case.is_pooled:
            losses.append(validate(trainer, inputs, labels) / num_tokens)
        true_loss, truth = true_step(case.num_layers, dp)
        errors = []
        for loss in losses if trainer.pp_has_last_stage else ():
            if mesh is not None:
                dist.all_reduce(loss, group=mesh.get_group())
            errors.append(abs(loss.item() - true_loss) / true_loss)
        errors += [(own[each] - truth[each]).norm() / truth[each].norm() for each in own]
        return float(max(errors)), moved
    finally:
        distca.close()


@torch.no_grad()
def validate(trainer: Trainer, inputs: list[dict], labels: list[torch.Tensor]) -> torch.Tensor:
    """Call the schedule as torchtitan's validator does. Return the sum of losses."""
    for part in trainer.model_parts:
        part.eval()
    batches = [trainer.post_dataloading_process(*each) for each in zip(inputs, labels, strict=True)]
    losses: list[torch.Tensor] = []
    trainer.pp_schedule.eval(
        arg_mbs=[(each[0],) for each in batches] if trainer.pp_has_first_stage else None,
        kwarg_mbs=[each[2] for each in batches],
        target_mbs=labels if trainer.pp_has_last_stage else None,
        losses=losses,
    )
    return sum(losses, torch.zeros(()))
