"""Lets all stages of a torchtitan pipeline share attention. Write a configuration in a module of
your own, and pass it with --module:

    from torchtitan.models.llama3 import config_registry
    from distca.integrations.torchtitan_pipelines import pooled

    def llama3_pooled():
        return pooled(config_registry.llama3_debugmodel())

torchtitan's overrides only replace configurations, and the function that builds a pipeline is a
field of the model's specification instead. `pooled` replaces that field.
"""

import functools
from collections.abc import Callable
from dataclasses import replace

from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from distca._torch_private import parts_of
from distca.integrations.pipelining import SchedulePooled
from distca.integrations.torchtitan import (
    MODULE,
    BalancedAttention,
    SavingAC,
    boundaries_of_metadata,
    open_session,
    recent_reports,
)
from distca.options import check
from distca.planning.documents import Documents

SCHEDULES = ("1F1B", "Interleaved1F1B")  # with one stage per rank, and with several


def pooled(config, *, max_in_flight: int | None = None, split_backward: bool = False):
    """Let the trainer of `config`, a torchtitan Trainer.Config, run its pipeline with
    SchedulePooled. Return `config`. The other arguments are passed to the schedule.

    Attention is balanced over the ranks of torchtitan's meshes "pp" and "batch". Training needs
    the overrides of distca.integrations.torchtitan. Without pipeline parallelism nothing changes.
    Raises ValueError if torchtitan cannot cut the model into stages. The trainer raises ValueError
    when it is built with settings that the schedule does not support.
    """
    spec = config.model_spec
    if spec.pipelining_fn is None:
        raise ValueError(
            f"model_spec.pipelining_fn is None for {spec.name}; expected a model that torchtitan "
            "can cut into stages"
        )
    options = {"max_in_flight": max_in_flight, "split_backward": split_backward}
    pipelining_fn = functools.partial(pipeline, spec.pipelining_fn, options)
    config.model_spec = replace(spec, pipelining_fn=pipelining_fn)
    BalancedAttention.axes = ["pp", "batch"]
    return config


def pipeline(
    pipelining_fn: Callable, options: dict, model: nn.Module, **arguments
) -> tuple[SchedulePooled, list[nn.Module], bool, bool]:
    """Build a pipeline with torchtitan's `pipelining_fn`, and replace its schedule."""
    ac_config = arguments["ac_config"]
    _check(arguments["parallelism"], ac_config, options["split_backward"])
    session = open_session(arguments["parallel_dims"])
    schedule, *others = pipelining_fn(model, **arguments)
    ours = TrainerSchedule(
        *parts_of(schedule),
        scale_grads=False,
        group=session.group,
        recompute=isinstance(ac_config, FullAC.Config),
        **options,
    )
    return ours, *others


def _check(parallelism, ac_config, splits_backward: bool) -> None:
    def check_field(name: str, is_valid: Callable[[object], bool], expected: str) -> None:
        value = getattr(parallelism, name)
        check(name, value, is_valid(value), f"{expected} with distca's pipeline schedule")

    for name in ("tensor_parallel_degree", "context_parallel_degree"):
        check_field(name, lambda value: value == 1, "1")
    check_field("spmd_backend", lambda value: value != "full_dtensor", "spmd_types")
    check_field(
        "pipeline_parallel_schedule",
        lambda value: value in SCHEDULES,
        "1F1B for one stage per rank, or Interleaved1F1B for several,",
    )
    check_field("pipeline_parallel_schedule_csv", lambda value: not value, "none")
    if not BalancedAttention.is_in_use:
        raise ValueError(
            "no layer of the model has balanced attention, so stages have nothing to share; "
            f"expected the override {MODULE}.attention"
        )
    if BalancedAttention.runs > 1:
        raise ValueError("ping_pong is True; expected False with distca's pipeline schedule")
    if splits_backward and ac_config is not None:
        raise ValueError(
            "split_backward is True with activation_checkpoint; expected only one of them: the "
            "backward pass of a checkpointed block cannot be split"
        )
    if isinstance(ac_config, SelectiveAC.Config) and not isinstance(ac_config, SavingAC.Config):
        raise ValueError(
            "activation_checkpoint is selective and would recompute attention outside its "
            f"tick; expected the override {MODULE}.selective_checkpoint"
        )


class TrainerSchedule(SchedulePooled):
    """Runs SchedulePooled as torchtitan's trainer calls a schedule. It reads the documents of a
    micro-batch from the attention metadata, which every stage gets."""

    def step(self, *, kwarg_mbs: list[dict], return_outputs: bool = False, **arguments) -> None:
        """Run a step on lists of micro-batches: `arg_mbs`, `kwarg_mbs` and `target_mbs`. Needs
        PyTorch 2.14 or newer, whose schedules take such lists."""
        with self._told():
            documents = [_documents_of(each) for each in kwarg_mbs]
        lists = {"kwarg_mbs": kwarg_mbs, "return_outputs": return_outputs, **arguments}
        super().step(documents=documents, **lists)
        recent_reports.extend((lambda report=report: report) for _, report in self.reports())

    def _keywords_of(self, kwargs: dict, documents: Documents) -> dict:
        return kwargs


def _documents_of(keywords: dict) -> Documents:
    packing, positions = (keywords.get(name) for name in ("attention_masks", "positions"))
    if positions is None:
        raise ValueError(
            f"a micro-batch has {sorted(keywords)}; expected positions, which say where documents "
            "begin"
        )
    documents = boundaries_of_metadata(packing, tuple(positions.shape)).here
    if documents.crosses_ranks:
        raise ValueError(
            "documents cross ranks; expected ranks_per_batch 1 with distca's pipeline schedule"
        )
    return documents
