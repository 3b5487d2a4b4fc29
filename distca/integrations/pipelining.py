"""A schedule for torch.distributed.pipelining in which all stages share attention.

Time passes in ticks: all ranks run a forward pass, or all run a backward pass, each of one
micro-batch. So the attention of all stages is one pool, and idle ranks compute a part of it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torch.nn.parallel import DistributedDataParallel

from distca import attention, ops, scope
from distca._torch_private import (
    check_stages,
    drop_other_inputs,
    initialize_stages,
    stage_inputs,
)
from distca.integrations.attention_pool import AttentionPool, PlannedCall, Recorder, RunningTick
from distca.options import check
from distca.planning.documents import Documents, check_documents
from distca.planning.plan_report import PlanReport
from distca.planning.ticks import Pass, Tick, ticks_of
from distca.ranks.planner_thread import PlannerThread
from distca.ranks.session import opened

LOOK_S = 0.5  # from one look at other ranks to the next, while activations travel


@dataclass
class _Inputs:
    """Arguments of a step, by micro-batch, and the losses that it has computed."""

    args: list[tuple]
    kwargs: list[dict]
    targets: list | None
    loss_kwargs: dict
    return_outputs: bool
    losses: dict[int, Tensor] = field(default_factory=dict)


class SchedulePooled(PipelineScheduleMulti):
    """Run a step of a pipeline, and balance attention over all ranks of `group`: all data parallel
    ranks of all stages, `mesh["pp", "dp"]` (default: as for distca.init).

    `stages` are this rank's stages, or one stage. Interleaved stages are placed as in torch: stage
    i is on rank i % pp. Every submodule gets the documents of its micro-batch as keyword
    `documents`, and they are in force for the drop-ins, as in `distca.documents`. Call the schedule
    on every rank:

        schedule.step(tokens, documents=documents)  # first stage
        schedule.step(documents=documents, target=labels, losses=losses)  # last stage

    `documents` has one `Documents` for each micro-batch. torch cuts tokens and labels into equal
    parts, so all micro-batches of a rank have the same number of tokens.

    A micro-batch is in flight from its forward pass in stage 0 to its backward pass there.
    `max_in_flight` limits their number, and so memory. None allows as many as keep all stages
    busy: 2 * stages - 1 if each rank has one stage. `split_backward` moves gradients of weights
    into ticks in which the rank is idle. With `recompute`, attention is called inside
    torch.utils.checkpoint, which runs it again in the backward pass; each checkpoint holds one
    call. Leave it False if selective checkpointing saves the results of attention. The other
    arguments are those of torch's schedules.

    The first step counts the calls of attention in each stage, in a forward pass over zeros that
    computes no attention. Later passes must make the same calls. Raises ValueError on every rank if
    ranks differ, if the group has servers that run no model, or if PyTorch is newer than the
    releases that the schedule was tested with.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., Tensor] | None = None,
        *,
        group: ProcessGroup | DeviceMesh | None = None,
        max_in_flight: int | None = None,
        split_backward: bool = False,
        recompute: bool = False,
        **arguments,
    ) -> None:
        check_stages()
        stages = [stages] if isinstance(stages, PipelineStage) else list(stages)
        is_limit = max_in_flight is None or max_in_flight >= 1
        check("max_in_flight", max_in_flight, is_limit, "None, or at least 1")
        check("n_microbatches", n_microbatches, n_microbatches >= 1, "at least 1")
        session = opened(group)
        check("servers", session.servers, not session.servers, "none with a pipeline")
        super().__init__(stages, n_microbatches, loss_fn, **arguments)
        if split_backward:
            _check_split(stages, recompute)
        self._loss, self._num_micro_batches = loss_fn, n_microbatches
        self._max_in_flight, self._splits = max_in_flight, split_backward
        self._finalizes = True  # whether this step ends with FSDP's reduction of gradients
        self._pool = AttentionPool(session, recompute)
        self._is_declared = False
        self._documents: list[Documents] = []  # of this step
        self._ahead: tuple = ((), None)  # the key of the step that was planned, and its plans
        self._receiver = PlannerThread()  # waits for activations on the CPU
        self._arriving: dict[tuple[bool, Pass], list[dist.Work]] = {}
        self._stage_of = {stage.stage_index: stage for stage in stages}
        self._device = stages[0].device
        num_stages = stages[0].num_stages
        self._rank_of_stage = [self.stage_index_to_group_rank[i] for i in range(num_stages)]
        self._num_backward: dict[int, int] = {}  # backward passes in this step, by stage
        self._num_gradients: dict[Pass, int] = {}  # of outputs that need one, by forward pass

    def step(self, *args, documents: Sequence[Documents] = (), **keywords):
        """Run a step as torch's schedules do. `documents` are those of each micro-batch, equal on
        all stages of a pipeline."""
        with self._told():
            self._check_count("documents", documents)
            for each in documents:
                check_documents(each)
        self._documents = list(documents)
        self._finalizes = keywords.get("finalize_gradients", True)  # from PyTorch 2.15 on
        return super().step(*args, **keywords)

    def _check_count(self, name: str, values: Sequence) -> None:
        count = self._num_micro_batches
        check(name, values, len(values) == count, f"{count}, one a micro-batch")

    def plan(self, documents: Sequence[Documents]) -> None:
        """Let the planner thread plan the next step, which gets the same `documents`, while this
        one runs. Collective. Does nothing before the first step, which counts the calls."""
        if self._is_declared:
            has_backward = self._loss is not None
            self._ahead = (has_backward, *documents), self._planned(documents, has_backward)

    def _planned(
        self, documents: Sequence[Documents], has_backward: bool
    ) -> tuple[list[Documents], list[Tick], list[list[PlannedCall]]]:
        """Return the documents as the ticks of a step see them, the ticks and their calls."""
        # Without the plans of other uses, so that calls outside ticks stay on this rank.
        own, ticks = [each.unplanned() for each in documents], self._ticks(has_backward)
        return own, ticks, self._pool.plan(ticks, self.rank, own, self._device)

    def ticks(self) -> list[Tick]:
        """Return the ticks of a step of training, or of evaluation without a loss function."""
        return self._ticks(self._loss is not None)

    def _ticks(self, has_backward: bool) -> list[Tick]:
        return ticks_of(
            self._rank_of_stage,
            self._num_micro_batches,
            self._max_in_flight,
            has_backward=has_backward,
            splits_backward=self._splits,
        )

    def reports(self) -> list[tuple[str, PlanReport]]:
        """Return the reports of the last step's plans, each with the name of its tick. In this
        name, "0F3 1F2" means that stage 0 runs micro-batch 3 and stage 1 runs micro-batch 2."""
        return list(self._pool.reports)

    def _step_microbatches(
        self,
        arg_mbs: list | None = None,
        kwarg_mbs: list | None = None,
        target_mbs: list | None = None,
        losses: list | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict | None = None,
    ) -> None:
        settings = (target_mbs, loss_kwargs or {}, return_outputs)
        with self._told():
            inputs = self._checked(_Inputs(arg_mbs or [], kwarg_mbs or [], *settings))
            has_backward = any(stage.has_backward for stage in self._stage_of.values())
            self._prepare(inputs, self._documents[0].unplanned())
        key, planned = self._ahead
        self._ahead = ((), None)
        if key != (has_backward, *self._documents):
            planned = self._planned(self._documents, has_backward)
        own_documents, ticks, calls = planned
        pairs = zip(inputs.kwargs, own_documents, strict=True)
        inputs.kwargs = [self._keywords_of(*each) for each in pairs]
        self._pool.reports.clear()
        self._pool.begin_step(self._device)
        self._num_backward = dict.fromkeys(self._stage_of, 0)
        self._num_gradients.clear()
        sent: list[list[dist.Work]] = []
        for number, tick in enumerate(ticks):
            own = tick.passes.get(self.rank)
            documents = None if own is None else own_documents[own.micro_batch]
            running = RunningTick(self._pool, number, tick, own, documents, calls[number])
            calls[number] = []  # so that plans are freed
            with self._told(running.name), self._in_tick(running, documents):
                if own is not None and tick.is_forward:
                    self._forward(own, inputs)
                elif own is not None:
                    self._backward(own, inputs, self.rank not in tick.split)
                running.finish()
                if self.rank in tick.weights:
                    self._backward_weights(tick.weights[self.rank])
                sent.append(self._send(tick))
        with self._told("the end of a step"):
            for works in sent:
                self._wait(works, "the last gradients of a step")
        self._pool.end_step()
        if has_backward:
            self._finish_gradients()
        if losses is not None and self._last_stage is not None:
            losses[:] = inputs.losses.values()

    @property
    def _last_stage(self) -> PipelineStage | None:
        """The last stage of the pipeline, if this rank has it."""
        return self._stage_of.get(len(self._rank_of_stage) - 1)

    def _checked(self, inputs: _Inputs) -> _Inputs:
        """Check the inputs of a step, and fill in empty ones if this rank has none."""
        inputs.args = inputs.args or [()] * self._num_micro_batches
        inputs.kwargs = inputs.kwargs or [{}] * self._num_micro_batches
        for name, each in (("arg_mbs", inputs.args), ("kwarg_mbs", inputs.kwargs)):
            self._check_count(name, each)
        if inputs.targets is not None:
            self._check_count("target_mbs", inputs.targets)
        elif self._last_stage is not None and self._last_stage.has_backward:
            raise ValueError("target is None on the last stage; expected labels, or a call of eval")
        return inputs

    def _finish_gradients(self) -> None:
        for stage in self._stage_of.values():
            if self._finalizes or not isinstance(stage.submod, FSDPModule):
                stage.perform_reduce_grad(self._num_micro_batches if self.scale_grads else 1)

    def _keywords_of(self, kwargs: dict, documents: Documents) -> dict:
        """Return the keyword arguments of stage modules for a micro-batch with these documents."""
        return {**kwargs, "documents": documents}

    def _prepare(self, inputs: _Inputs, documents: Documents) -> None:
        """Initialise the stages, and let all ranks know which calls of attention they make."""
        kwargs = self._keywords_of(inputs.kwargs[0], documents)
        target = None if inputs.targets is None else inputs.targets[0]
        with self._recording(documents):
            initialize_stages(self, inputs.args[0], kwargs, target, inputs.loss_kwargs)
        if self._is_declared:
            return
        calls = {}
        for index, stage in self._stage_of.items():
            with self._recording(documents) as recorder, torch.no_grad():
                stage.forward_maybe_with_nosync(*stage_inputs(stage), **kwargs)
            calls[index] = recorder.kinds
        num_stages, max_in_flight = len(self._rank_of_stage), self._max_in_flight or 0
        settings = (self._num_micro_batches, num_stages, max_in_flight, self._splits)
        self._pool.declare(calls, (*settings, self._pool.recompute))
        self._is_declared = True

    @contextlib.contextmanager
    def _recording(self, documents: Documents) -> Iterator[Recorder]:
        recorder = Recorder()
        with attention.routed(documents, recorder.attend), _in_force(documents):
            yield recorder

    @contextlib.contextmanager
    def _in_tick(self, running: RunningTick, documents: Documents | None) -> Iterator[None]:
        running.wait_for_plans()
        self._pool.running = running
        try:
            scopes = (attention.routed(documents, running.attend), _in_force(documents))
            with scopes[0], scopes[1], running.timed():
                yield
        finally:
            self._pool.running = None

    @contextlib.contextmanager
    def _told(self, place: str = "") -> Iterator[None]:
        """Tell the other ranks of an error inside. If torch's stages have wrapped it in an error of
        their own, raise its cause. If one of torch's transfers failed because another rank had
        failed, raise an error that names that rank."""
        try:
            yield
        except Exception as error:
            is_wrapped = type(error) is RuntimeError and isinstance(error.__cause__, Exception)
            cause = error.__cause__ if is_wrapped else error
            if type(cause) in (RuntimeError, dist.DistNetworkError):
                self._check_ranks(place)
            self._pool.session.announce(cause, place)
            if is_wrapped:
                raise cause from None
            raise

    def _check_ranks(self, activity: str) -> None:
        """If another rank has failed, raise an error that names it."""
        name = self._pool.session.group_name
        if name:
            ops.check_ranks(name, activity)

    def _forward(self, own: Pass, inputs: _Inputs) -> None:
        stage, index = self._stage_of[own.stage], own.micro_batch
        self._receive(True, own)
        arguments = (inputs.args[index], inputs.kwargs[index], inputs.return_outputs)
        output = stage.forward_one_chunk(index, *arguments)
        drop_other_inputs(stage, index)
        if stage is self._last_stage:
            if self._loss is not None and inputs.targets is not None:
                loss = self._loss(output, inputs.targets[index], **inputs.loss_kwargs)
                inputs.losses[index] = loss
            return
        outputs = [output] if isinstance(output, Tensor) else output
        self._num_gradients[own] = sum(each.requires_grad for each in outputs)
        following = self._stage_of.get(own.stage + 1)
        if following is not None:
            following.set_local_fwd_input(output, index)

    def _backward(self, own: Pass, inputs: _Inputs, is_full: bool) -> None:
        stage, index = self._stage_of[own.stage], own.micro_batch
        self._receive(False, own)
        is_last = is_full and self._is_last_backward(own.stage)
        stage.backward_one_chunk(index, inputs.losses.get(index), is_full, is_last)
        previous = self._stage_of.get(own.stage - 1)
        if previous is not None:
            gradients = stage.get_local_bwd_output(index)
            num_gradients = sum(each is not None for each in gradients)
            self._check_gradients(Pass(previous.stage_index, index), num_gradients)
            previous.set_local_bwd_input(gradients, index)

    def _check_gradients(self, forward: Pass, num_gradients: int) -> None:
        """Raise ValueError if a stage gets fewer gradients than its forward pass has outputs that
        need one. From PyTorch 2.12 on, stages rely on requires_grad of input_args and
        output_args."""
        num_needed = self._num_gradients.pop(forward)
        if num_gradients < num_needed:
            raise ValueError(
                f"stage {forward.stage} gets {num_gradients} gradients for micro-batch "
                f"{forward.micro_batch}, but {num_needed} of its outputs need one; expected "
                "input_args and output_args of PipelineStage with requires_grad=True, or neither"
            )

    def _backward_weights(self, own: Pass) -> None:
        is_last = self._is_last_backward(own.stage)
        self._stage_of[own.stage].backward_weight_one_chunk(own.micro_batch, is_last)

    def _is_last_backward(self, stage: int) -> bool:
        self._num_backward[stage] += 1
        return self._num_backward[stage] == self._num_micro_batches

    def _send(self, tick: Tick) -> list[dist.Work]:
        """Send what this rank's pass gives to the next stage, and begin to receive what others'
        passes give to this rank's stages."""
        following = 1 if tick.is_forward else -1
        operations, received = [], []
        for rank, each in tick.passes.items():
            stage, index = each.stage + following, each.micro_batch
            if not 0 <= stage < len(self._rank_of_stage):
                continue
            target = self._rank_of_stage[stage]
            if rank == self.rank != target:
                source = self._stage_of[each.stage]
                sends = source.get_fwd_send_ops if tick.is_forward else source.get_bwd_send_ops
                operations += sends(index)
            elif target == self.rank != rank:
                own, place = self._stage_of[stage], Pass(stage, index)
                if tick.is_forward:
                    operations += own.get_fwd_recv_ops(index)
                else:
                    gradients = own.get_bwd_recv_ops(index)
                    self._check_gradients(place, len(gradients))
                    operations += gradients
                received.append((tick.is_forward, place))
        works = dist.batch_isend_irecv(operations) if operations else []
        for place in received:
            self._arriving[place] = works
        return works

    def _receive(self, is_forward: bool, own: Pass) -> None:
        kind = "activations" if is_forward else "gradients"
        what = f"the {kind} of micro-batch {own.micro_batch} for stage {own.stage}"
        self._wait(self._arriving.pop((is_forward, own), []), what)

    def _wait(self, works: list[dist.Work], what: str) -> None:
        """Wait for transfers of torch. On devices, their streams wait. On the CPU, this rank looks
        at the others meanwhile, because torch would wait until its own timeout."""
        if not works:
            return
        if self._device.type != "cpu":
            return _wait_all(works)
        pending = self._receiver.submit(_wait_all, works)
        while True:
            try:
                return pending.result(LOOK_S)
            except futures.TimeoutError:
                self._check_ranks(f"the wait for {what}")
            except RuntimeError:
                self._check_ranks(f"the wait for {what}")
                raise


def _wait_all(works: list[dist.Work]) -> None:
    while works:  # gloo would wait for another message if it were asked twice
        works.pop(0).wait()


@contextlib.contextmanager
def _in_force(documents: Documents | None) -> Iterator[None]:
    previous = scope.documents_in_force()
    scope.put_in_force(documents)
    try:
        yield
    finally:
        scope.put_in_force(previous)


def _check_split(stages: Sequence[PipelineStage], recompute: bool) -> None:
    if recompute:
        raise ValueError(
            "split_backward with recompute: gradients of weights would compute attention once more,"
            " outside the ticks; expected one of them"
        )
    if any(isinstance(stage.submod, DistributedDataParallel) for stage in stages):
        raise ValueError(
            "split_backward with DistributedDataParallel: it does not see gradients of weights that"
            " torch computes apart; expected fully_shard(..., reshard_after_forward=False)"
        )
