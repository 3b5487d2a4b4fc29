"""A transformer block on two halves of the tokens: one computes while the other communicates."""

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from distca import attention, scope
from distca._torch_private import CheckpointWrapper, checkpoint_hooks, not_compiled, pytree
from distca.pingpong.relay import Relay
from distca.pingpong.token_rows import TokenRows
from distca.pingpong.turns import Turns
from distca.planning.documents import Documents
from distca.planning.halves import FIRST_PART
from distca.planning.plan import group_of
from distca.planning.step import plan_halves, row_of
from distca.ranks import session as sessions

INSIDE = "checkpoint the block that distca.PingPong returned, not what is inside it"


def third(documents: Documents) -> int:
    """Return the row after the first third of the tokens, rounded down. For documents that cross
    ranks, return the row at which the second run begins."""
    border = documents.run_border
    return int(FIRST_PART * documents.num_tokens) if border is None else border


def nearest_border(documents: Documents) -> int:
    """Return the document boundary nearest to `third`, as a row. No document is cut."""
    borders = documents.cu_seqlens.long()
    return int(borders[(borders - third(documents)).abs().argmin()])


Finder = Callable[[nn.Module, tuple, dict], Documents | None]


def documents_of_call(block: nn.Module, args: tuple, kwargs: dict) -> Documents | None:
    """Return the documents among a call's arguments, or those in force. Raises ValueError if there
    are several among the arguments."""
    leaves = pytree.tree_leaves((args, kwargs))
    documents = list({id(leaf): leaf for leaf in leaves if isinstance(leaf, Documents)}.values())
    if len(documents) > 1:
        raise ValueError(f"PingPong: {documents} among the arguments; expected one")
    return documents[0] if documents else scope.documents_in_force()


@dataclass
class _Settings:
    cut: Callable[[Documents], int]
    split: Mapping[int | str, int | None]
    find: Finder
    compiled: Callable | None = None  # what each half runs, once compiled
    is_checked: bool = False  # whether the block's parts were checked, at its first run


class PingPong(nn.Module):
    """Run a block on two halves of its tokens, which take turns: one computes while the other
    communicates, forward and backward.

    `PingPong(block, cut=third, split=None)` returns the block itself. Like fully_shard it changes
    the class of the block, to one that derives from PingPong and from the block's class.
    Parameters, buffers and submodules keep their names.

    The block is called as before, with x [tokens, ...] or [1, tokens, ...] first. The step's
    documents are among its arguments, or those of `distca.documents`, and must have a plan. Other
    tensors are split with x if they have one entry per token, in dimension 0 or in dimension 1
    behind a dimension of size 1, also inside tuples, lists and dicts. All other arguments go to
    both halves. `split` names exceptions by position (x is 0) or keyword: the dimension of tokens,
    or None for an argument that is not split. Results are tensors with a row for each token, None,
    or tuples, lists or dicts of these.

    `cut(documents)` returns the first row of the second half, by default after a third of the
    tokens. It may lie inside a document, except for windows that see to the right. Documents that
    cross ranks are cut between the two runs of each rank: `distca.shard_batch(..., runs=2)`. Give
    all blocks the same function, because halves are planned for each function. `find(block, args,
    kwargs)` returns the documents of a call, or None; it replaces the search among the arguments.

    The block runs whole if nothing travels: without documents, without a plan, if the plan moves no
    row, in a group of one rank, or with options.enabled False. It also runs whole for chunks of
    documents, which are short, and if the planner predicts that whole blocks are faster, for
    instance over fast links.

    Shard, checkpoint and compile the block after PingPong. Raises ValueError for a block that is
    already sharded, checkpointed or compiled, for documents that cross ranks with one run per rank,
    for an x without their tokens, and for results without a row for each token.
    """

    def __new__(
        cls,
        block: nn.Module | None = None,
        *,
        cut: Callable[[Documents], int] = third,
        split: Mapping[int | str, int | None] | None = None,
        find: Finder = documents_of_call,
    ):
        if block is None:  # copy.copy and copy.deepcopy make the instance first
            return super().__new__(cls)
        _check_block(block)
        block._ping_pong = _Settings(cut, dict(split or {}), find)
        block.__class__ = _ping_pong_class(type(block))
        return block

    def __init__(self, *_, **__) -> None:
        """Do nothing, because the block is initialised already."""

    def compile(self, *args, **kwargs) -> None:
        """Compile, by torch.compile, what each half runs. Attention breaks the graph."""
        self._ping_pong.compiled = torch.compile(super().forward, *args, **kwargs)

    def _run(self, *args, **kwargs):
        return (self._ping_pong.compiled or super().forward)(*args, **kwargs)

    def _run_whole(self, *args, **kwargs):
        """Run the block on the second half's stream, to reuse the memory that was freed there.
        PyTorch's caching allocator reuses freed memory only on the stream it was allocated on. On
        any other stream, whole blocks would reserve memory of their own."""
        leaves = pytree.tree_leaves((args, kwargs))
        x = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
        if x is None:
            return self._run(*args, **kwargs)
        turns = Turns(x.device)
        accumulators = _accumulators(self, turns)
        args, kwargs = turns.bordered((args, kwargs))
        with turns:
            with turns.half(1):
                results = self._run(*args, **kwargs)
            turns.join()
            del accumulators
            return turns.bordered(results)

    @not_compiled
    def forward(self, *args, **kwargs):
        settings = self._ping_pong
        documents = settings.find(self, args, kwargs)
        if not _may_pay(documents):
            return self._run(*args, **kwargs)
        if not _pays(documents):
            return self._run_whole(*args, **kwargs)
        if not settings.is_checked:
            _check_parts(self, [(name, part) for name, part in self.named_modules() if name])
            settings.is_checked = True
        session = sessions.find(group_of(documents))
        sessions.halves_of(session)  # collective at first, so call it before a rank can refuse
        try:
            row = row_of(settings.cut, documents)
            rows = TokenRows(documents.num_tokens, row, args, kwargs, settings.split)
        except Exception as error:
            session.announce(error)  # other ranks may not raise it
            raise
        names = [each.group_name for each in session.halves]
        turns = Turns(rows.device, names, is_timed=session.hiding.is_due())
        accumulators = _accumulators(self, turns)
        step = _Step(documents, settings.cut, turns, Relay(session.announce))

        def half(idx: int):
            with turns.half(idx):
                return self._run(*rows.args[idx], **rows.kwargs[idx])

        with turns, attention.routed(documents, step.attend):
            results = step.relay.run(*(functools.partial(half, idx) for idx in range(2)))
            step.check_calls()
            if turns.before_attention is not None and row > 0:
                session.hiding.add(*turns.before_attention, row / documents.num_tokens)
            turns.follow_backward(0, results[0])
            turns.join()
            del accumulators
            return rows.joined(results)


@functools.cache
def _ping_pong_class(kind: type[nn.Module]) -> type[nn.Module]:
    # Frameworks find the blocks to shard by their class name.
    return type(kind.__name__, (PingPong, kind), {"__module__": kind.__module__})


def _check_block(block: nn.Module) -> None:
    name = type(block).__name__
    if not isinstance(block, nn.Module):
        raise ValueError(f"block is {block!r:.80}; expected a module")
    if isinstance(block, PingPong):
        raise ValueError(f"block {name} is a PingPong already")
    if "forward" in block.__dict__:
        raise ValueError(f"block {name} has a forward of its own instance; expected its class's")
    if block._compiled_call_impl is not None:
        raise ValueError(f"block {name} is compiled; compile what PingPong returns")
    _check_parts(block, block.named_modules())


def _check_parts(block: nn.Module, parts: Iterable[tuple[str, nn.Module]]) -> None:
    from torch.distributed.fsdp import FSDPModule  # takes 0.2 s to import

    for name, part in parts:
        where = f"block {type(block).__name__}" + (f", {name}" if name else "")
        if isinstance(part, FSDPModule):
            raise ValueError(f"{where} is sharded; call fully_shard on what PingPong returns")
        if isinstance(part, CheckpointWrapper):
            raise ValueError(f"{where} is checkpointed; {INSIDE}")


def _may_pay(documents: Documents | None) -> bool:
    """Return whether the block may run in halves for these documents. The result is the same on all
    ranks. Raises ValueError for documents that cross ranks with one run per rank."""
    if documents is None:
        session = sessions.find()
        if session is not None and session.num_ranks > 1 and torch.is_grad_enabled():
            warnings.warn(
                "distca.PingPong: no documents are in the block's arguments or in force, so it "
                "runs whole; pass them to the block or enter distca.documents",
                stacklevel=4,
            )
        return False
    session = sessions.find(group_of(documents))
    if not documents._plans or session is None:
        return False
    if session.num_ranks == 1 or not session.options.enabled or documents.chunk_size is not None:
        return False
    if documents.crosses_ranks and documents.run_border is None:
        raise ValueError(
            f"PingPong: {documents} cross ranks in one run for each; expected two, as "
            "distca.shard_batch(..., runs=2) or Documents.sharded(..., runs=2) cuts them"
        )
    return True


def _pays(documents: Documents) -> bool:
    """Return whether rows travel between ranks and halves are predicted to be faster. The result is
    the same on all ranks."""
    reports = [plan.report() for plan in documents._plans.values()]
    return any(any(each.bytes_out) and each.pays_in_halves for each in reports)


def _accumulators(block: nn.Module, turns: Turns) -> list:
    """Return the nodes that accumulate the gradients of the block's parameters. Gradients come from
    the halves' streams, but as long as the caller holds them, the nodes belong to the current
    stream, where FSDP reads gradients in the backward pass."""
    if not (turns.streams and torch.is_grad_enabled()):
        return []
    parameters = (parameter for parameter in block.parameters() if parameter.requires_grad)
    return [torch.autograd.graph.get_gradient_edge(parameter) for parameter in parameters]


@dataclass
class _Step:
    """The attention calls of one forward pass. Calls of the first half leave keys and values for
    those of the second."""

    documents: Documents
    cut: Callable[[Documents], int]
    turns: Turns
    relay: Relay
    left: list = field(default_factory=list)  # by call: k, v of the first half, and their event
    num_calls: int = 0  # of the second half

    def __post_init__(self) -> None:
        self._grad_mode, self._hooks = torch.is_grad_enabled(), checkpoint_hooks()

    def attend(self, q, k, v, documents: Documents, *settings):
        """Compute what attend_rows would, for a call of core_attention in a half."""
        idx = self.relay.number
        if documents is not self.documents:
            raise ValueError(
                f"documents are {documents} in a PingPong block of {self.documents}; expected those"
            )
        if (torch.is_grad_enabled(), checkpoint_hooks()) != (self._grad_mode, self._hooks):
            raise ValueError(
                f"PingPong: attention is called inside torch.utils.checkpoint; {INSIDE}"
            )
        *_, window_size, _ = settings
        self.relay.call()
        own = plan_halves(documents, self.cut, window_size, q.device)[idx]
        inputs = q, k, v
        if idx == 0:
            self.left.append((k, v, self.turns.mark()))
        else:
            self.num_calls += 1
            if own.num_context_rows > 0 and self.num_calls <= len(self.left):
                left_k, left_v, event = self.left[self.num_calls - 1]
                if event is not None:
                    torch.cuda.current_stream(k.device).wait_event(event)
                first = left_k.shape[0] - own.num_context_rows
                k, v = torch.cat([left_k[first:], k]), torch.cat([left_v[first:], v])
        self.turns.follow_backward(idx, inputs)
        results = attention.attend_rows(q, k, v, own, *settings)
        self.relay.hand_over()
        self.turns.follow(idx)
        return results

    def check_calls(self) -> None:
        if self.num_calls != len(self.left):
            raise RuntimeError(
                f"PingPong: the block called attention {len(self.left)} times for its first half "
                f"and {self.num_calls} times for its second; expected as many"
            )
