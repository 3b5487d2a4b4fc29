"""Document boundaries as models receive them: cu_seq_lens keywords, or position_ids."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from distca._torch_private import NOT_BACKWARD, backward_pass
from distca.planning.cost import AttentionShape
from distca.planning.documents import Documents
from distca.planning.plan import Plan
from distca.planning.step import plan
from distca.ranks import session as sessions
from distca.ranks.hints import hint
from distca.ranks.session import Session

PACK = (
    "pack documents into one row, with transformers' DataCollatorWithFlattening or TRL's "
    "packing=True"
)

MAX_UNMARKED = 5  # batches in a row, before a hint

_known = WeakTensorKeyDictionary()  # Boundaries by cu_seq_lens_q or position_ids
_taken: weakref.WeakSet[Documents] = weakref.WeakSet()  # that have served a forward pass
# The session and the arguments of plan in the latest pass, by window and chunk size.
_latest: dict[tuple, tuple[weakref.ref[Session], dict]] = {}


class FirstBatches:
    """Logs a hint if none of a process's first training batches has boundaries."""

    def __init__(self, text: str) -> None:
        self._text, self._num_left = text, MAX_UNMARKED

    def see(self, is_marked: bool) -> None:
        self._num_left = 0 if is_marked else self._num_left - 1
        if self._num_left == 0 and not is_marked:
            hint(self._text)


_first = FirstBatches(
    f"the first {MAX_UNMARKED} training batches hold one document a row. If documents were joined "
    "in these rows without boundaries, attention crosses them: let the collator pass boundaries, "
    'or with TRL use packing_strategy="bfd", not "wrapped"'
)


@dataclass
class Boundaries:
    """The boundaries in one tensor, and the documents built from it."""

    state: tuple  # the tensor's version and the batch's shape that this was read from
    offsets: Tensor  # int64 [num_documents + 1], CPU: where documents begin in batch * tokens rows
    is_packed: bool  # some document is not a whole row of the batch
    here: Documents  # never planned
    balanced: Documents | None = None  # those of the latest forward pass
    users: weakref.WeakSet = field(default_factory=weakref.WeakSet)  # modules that attended to them
    made_in: int = NOT_BACKWARD  # the backward pass that `balanced` was made in

    def of_pass(
        self,
        module: nn.Module,
        session: Session | None,
        window_size: tuple[int, int],
        device: torch.device,
        shape: AttentionShape | None = None,
        chunk_size: int | None = None,
    ) -> tuple[Documents, Plan | None]:
        """Return the documents of this forward pass, or their chunks. If `module` is the first
        layer of the pass, plan them, and return the plan, too. Without a session they stay on this
        rank.

        Each forward pass has its own documents, even if it gets the same tensor as the one before.
        Another rank may get a new tensor, and ranks must count plans alike. A recomputation in the
        backward pass uses the documents of the forward pass. Documents that cross ranks are shared
        even without a session.
        """
        if session is None and not self.here.crosses_ranks:
            return chunks_of(self.here, chunk_size), None
        session = session or sessions.opened()
        task = backward_pass()
        if task == NOT_BACKWARD:
            is_new = self.balanced is None or module in self.users
        else:  # reentrant checkpointing has no gradients, and so no plan, in its forward pass
            is_new = self.balanced is None or self.made_in not in (NOT_BACKWARD, task)
        if is_new:
            self.balanced, self.users = self.here.unplanned(), weakref.WeakSet()
            self.made_in = task
        is_first = not self.users
        self.users.add(module)
        if is_first:
            _latest.clear()
        how = {"window_size": window_size, "group": session.group, "device": device, "shape": shape}
        documents = chunks_of(self.balanced, chunk_size)
        key = documents.plan_key(window_size)
        _latest.setdefault(key, (weakref.ref(session), how))
        if not is_first:
            return documents, None
        _first.see(self.is_packed or self.here.crosses_ranks)
        return documents, self.balanced._plans.get(key) or plan(documents, **how)


def chunks_of(documents: Documents, size: int | None) -> Documents:
    """Return `documents` cut into chunks of `size` tokens, or as they are if it is None."""
    return documents if size is None else documents.chunked(size)


def remember(keywords: dict, documents: Documents, batch: int, num_tokens: int) -> None:
    """Use `documents` instead of reading the tensor of `keywords` that read_boundaries would read.
    The first forward pass uses them and their plans. Later passes get copies without plans."""
    tensors = (keywords.get(name) for name in ("cu_seq_lens_q", "position_ids"))
    tensor = next((each for each in tensors if each is not None), None)
    if not isinstance(tensor, Tensor) or documents.num_tokens != batch * num_tokens:
        raise ValueError(
            f"documents is {documents}, with boundaries of type {type(tensor).__name__} and "
            f"a batch of shape {[batch, num_tokens]}; expected all of them from one collator"
        )
    remember_tensor(tensor, documents, (batch, num_tokens))


def remember_tensor(
    tensor: Tensor, documents: Documents, shape: tuple[int, int] | None = None
) -> None:
    """Use `documents` instead of reading `tensor`, as `remember` does."""
    offsets = documents.cu_seqlens.to(torch.int64)
    boundaries = _keep(tensor, shape, offsets, documents.unplanned())
    if documents not in _taken:
        _taken.add(documents)
        boundaries.balanced = documents


def _keep(
    tensor: Tensor, shape: tuple[int, int] | None, offsets: Tensor, documents: Documents
) -> Boundaries:
    batch, num_tokens = shape or (1, int(offsets[-1]))
    is_packed = not torch.equal(offsets, torch.arange(batch + 1) * num_tokens)
    state = _state_of(tensor, shape)
    boundaries = _known[tensor] = Boundaries(state, offsets, is_packed, documents)
    return boundaries


def _state_of(tensor: Tensor, shape: tuple[int, int] | None) -> tuple:
    # Inference tensors do not count their changes, so they are read at every call.
    return (None if tensor.is_inference() else tensor._version, shape)


def check_cut(name: str, value: object, shape: list[int]) -> None:
    """Raises ValueError unless `value` can be cut with the tokens of a batch, whose shape is
    `shape` = [rows, tokens]."""
    if not isinstance(value, Tensor) or list(value.shape[:2]) != shape:
        described = str(list(value.shape)) if isinstance(value, Tensor) else repr(value)
        raise ValueError(
            f"{name} is {described:.80} in a batch of shape {shape}; expected a tensor with a "
            "value for each token, because it is cut with them"
        )


def plan_ahead(documents: Documents) -> None:
    """Plan documents in the background, for the windows, chunks and heads of the latest forward
    pass. Does nothing if there was no such pass or its session is closed. Collective, like
    `distca.plan`."""
    for (*_, chunk_size), (session_of, how) in list(_latest.items()):
        session = sessions.find(how["group"])
        if session is None or session is not session_of():
            continue
        if session.options.enabled or documents.crosses_ranks:
            plan(chunks_of(documents, chunk_size), **how, ahead=True)


def read_boundaries(keywords: dict, batch: int, num_tokens: int, reader: str) -> Boundaries:
    """Return the boundaries of `batch` rows of `num_tokens` tokens from the keywords of `reader`,
    an attention layer. Read a tensor from the device once, and again after a change in place.

    Raises ValueError if boundaries are missing, contradict each other, or begin inside a document.
    """
    cu_seqlens, position_ids = (keywords.get(name) for name in ("cu_seq_lens_q", "position_ids"))
    tensor = cu_seqlens if cu_seqlens is not None else position_ids
    if not isinstance(tensor, Tensor):
        raise ValueError(
            f"position_ids is {position_ids!r:.80} and cu_seq_lens_q {cu_seqlens!r:.80} in "
            f"{reader}: document boundaries are missing; expected a tensor. "
            f"Pass one of them to the model: {PACK}"
        )

    def read() -> Tensor:
        if cu_seqlens is None:
            return offsets_of_positions(position_ids, batch, num_tokens)
        return _offsets_of_cu_seqlens(keywords, batch, num_tokens)

    return boundaries_of(tensor, read, (batch, num_tokens))


def boundaries_of(
    tensor: Tensor, read: Callable[[], Tensor], shape: tuple[int, int] | None = None
) -> Boundaries:
    """Return the boundaries that `tensor` holds for a batch of `shape` (rows, tokens); None: of one
    row. `read` returns their offsets, int64 on the CPU. It is called once, and again after `tensor`
    has changed in place."""
    state, boundaries = _state_of(tensor, shape), _known.get(tensor)
    if boundaries is not None and state[0] is not None and boundaries.state == state:
        return boundaries
    offsets = read()
    is_known = boundaries is not None and boundaries.state == state  # of an inference tensor
    if is_known and torch.equal(boundaries.offsets, offsets):
        return boundaries
    return _keep(tensor, shape, offsets, Documents(offsets))


def _offsets_of_cu_seqlens(keywords: dict, batch: int, num_tokens: int) -> Tensor:
    cu_seqlens, num_rows = keywords["cu_seq_lens_q"], batch * num_tokens
    try:
        offsets = Documents(cu_seqlens).cu_seqlens.to(torch.int64)
    except ValueError as error:
        raise ValueError(f"cu_seq_lens_q: {error}") from error
    if offsets[-1] != num_rows:
        raise ValueError(
            f"cu_seq_lens_q ends at {int(offsets[-1])}, but the batch of shape "
            f"{[batch, num_tokens]} has {num_rows} tokens; expected equal numbers: both "
            "from one collator, and neither cut, padded or gathered after it"
        )
    keys = keywords.get("cu_seq_lens_k")
    if keys is not None and keys is not cu_seqlens and not torch.equal(keys, cu_seqlens):
        raise ValueError(
            f"cu_seq_lens_k has {keys.numel()} boundaries and differs from cu_seq_lens_q with "
            f"{cu_seqlens.numel()}; expected equal ones: queries see keys of their own document"
        )
    position_ids = keywords.get("position_ids")
    if isinstance(position_ids, Tensor) and position_ids.numel() == num_rows:
        restarts = (position_ids.detach().flatten() == 0).nonzero()[:, 0].cpu()
        lost = restarts[~torch.isin(restarts, offsets)]
        if lost.numel():
            raise ValueError(
                f"position_ids restart at token {int(lost[0])}, inside a document of "
                "cu_seq_lens_q; expected a boundary there: pass the boundaries of the same packing"
            )
    return offsets


def offsets_of_positions(position_ids: Tensor, batch: int, num_tokens: int) -> Tensor:
    """Return where documents begin: where `position_ids` restart at 0, and at each row's start."""
    shape = list(position_ids.shape)
    if shape not in ([1, num_tokens], [batch, num_tokens]):
        raise ValueError(
            f"position_ids has shape {shape}; expected [{batch}, {num_tokens}] or [1, "
            f"{num_tokens}], because boundaries are read from it. Pass cu_seq_lens_q where "
            "positions are numbered otherwise (DataCollatorWithFlattening(return_flash_attn_kwargs="
            "True))"
        )
    positions = position_ids.detach().to("cpu", torch.int64).expand(batch, num_tokens)
    begins = positions == 0
    continues = torch.zeros_like(begins)
    continues[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
    wrong = (~(begins | continues)).flatten().nonzero()[:, 0]
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(
            f"position_ids is {int(positions.flatten()[at])} at token {at % num_tokens} of row "
            f"{at // num_tokens}; expected 0, where a document begins, or one more than at the "
            "token before: keys before it would be lost. Pass cu_seq_lens_q where positions are "
            "numbered otherwise, and do not shard sequences over ranks"
        )
    starts = begins.flatten().nonzero()[:, 0]
    return torch.cat([starts, torch.tensor([batch * num_tokens])])
