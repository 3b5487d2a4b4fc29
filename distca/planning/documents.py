"""Which tokens belong together: the documents in a rank's packed rows."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from distca.options import check, digest_of, is_integer

MAX_DOCUMENTS_PER_RANK = 2**31  # ids of whole documents are (rank + 1) * 2**32 + index
MAX_PACKS = 2**31  # ids of documents that cross ranks are pack * 2**32 + index
NO_PACK = (-1, 0, 0)  # pack_words of documents that do not cross ranks
FROM_HERE = (0, -1)  # window of a span's attention: each query and what follows it
INT32_MAX = 2**31 - 1  # row indices and the kernels' windows are int32


class Documents:
    """The documents of one rank's packed rows, in row order.

    `Documents(cu_seqlens)` describes whole documents: document i is rows
    [cu_seqlens[i], cu_seqlens[i + 1]). `Documents.sharded` describes one rank's part of a pack that
    all ranks share, where documents may cross ranks.

    With `parents`, documents share prefixes, as samples share their prompt: see `sharded`.

    With `spans`, causal documents have parts whose queries see the whole part, such as images.

    The first rows may be context: keys and values of tokens whose queries another call computes.
    Then q has `num_context_rows` rows fewer than k and v, and `num_tokens` counts the rows of q.
    """

    def __init__(
        self,
        cu_seqlens: Tensor | Sequence[int],
        num_context_rows: int = 0,
        *,
        parents: Sequence[int] | None = None,
        spans: Tensor | Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`cu_seqlens` holds [num_documents + 1] integers from 0 to the number of tokens, context
        rows included, and never decreases. `num_context_rows` is the number of first rows without
        queries; it must be less than the length of the first document that is not empty.
        `parents[i]` is the document that document i continues, with a smaller index, or -1: see
        `sharded`. `spans`, integers [num_spans, 2], are rows [begin, end), in order and disjoint,
        each inside one document. Queries of a span see all of its keys besides those that their
        window shows. If any rank has spans, pass an empty list on the others. Raises ValueError for
        anything else.
        """
        offsets = _integers(cu_seqlens, "cu_seqlens")
        wrong = None
        if offsets.numel() == 0 or offsets[0] != 0:
            wrong = "; expected offsets, not lengths: [0, 5, 12] for documents of 5 and 7 tokens"
        elif (offsets[1:] < offsets[:-1]).any():
            wrong = "; expected it never to decrease"
        elif offsets[-1] > INT32_MAX:
            wrong = f", up to {int(offsets[-1])}; a rank holds at most {INT32_MAX} tokens"
        if wrong is not None:
            raise ValueError(f"cu_seqlens is {_abridged(offsets)}{wrong}")
        lengths = offsets.diff()
        starts, context = torch.zeros_like(lengths), torch.zeros_like(lengths)
        check("num_context_rows", num_context_rows, is_integer(num_context_rows), "an integer")
        if num_context_rows != 0:
            first = int((lengths > 0).nonzero()[:1].sum())  # 0 where all are empty
            most = max(0, int(lengths[first : first + 1].sum()) - 1)
            expected = f"0 to {most}: a part of the first document"
            check("num_context_rows", num_context_rows, 0 <= num_context_rows <= most, expected)
            context[first] = num_context_rows
        index = torch.arange(lengths.numel())
        if spans is not None and (num_context_rows != 0 or parents is not None):
            raise ValueError("spans are given with num_context_rows or parents; expected neither")
        if parents is None:
            self._set_pieces(index, starts, lengths, context)
            if spans is not None:
                self._set_spans(spans_of(spans, offsets[1:]), slice(0, int(offsets[-1])))
            return
        if num_context_rows != 0:
            raise ValueError(f"num_context_rows is {num_context_rows} with parents; expected 0")
        self._set_tree(torch.stack([index, starts, lengths], dim=1), lengths, parents)

    @classmethod
    def sharded(
        cls,
        lengths: Tensor | Sequence[int],
        rank: int,
        world_size: int,
        runs: int = 1,
        pack: int = 0,
        parents: Sequence[int] | None = None,
        spans: Tensor | Sequence[Sequence[int]] | None = None,
    ) -> "Documents":
        """Return the documents of `rank` in a global pack that all ranks share.

        `lengths` are the lengths of the pack's documents. The pack is cut into `world_size` runs of
        tokens, one for each rank. With runs=2, which distca.PingPong needs, each half of the pack
        is cut into `world_size` runs, and a rank holds two: run `rank` of the first half, then run
        `rank` of the second. Runs have equal numbers of tokens; if the pack does not divide, some
        are one token longer. If one group holds several packs, `pack` is the number of this pack,
        and `rank` and `world_size` count the ranks that share it.

        With `parents`, documents share prefixes, as samples share their prompt: `parents[i]` is the
        document that document i continues, with a smaller index, or -1. Its queries see all keys of
        its ancestors before its own, and its positions continue theirs. Needs runs=1.

        `spans`, integers [num_spans, 2], are tokens [begin, end) of the pack whose queries see the
        whole span, equal on all ranks: see Documents. Needs runs=1, and no `parents`.

        Raises ValueError for lengths that are not integers >= 0, for more tokens than the ranks
        can hold, for a rank outside [0, world_size), for runs other than 1 and 2, or for a pack
        outside [0, 2**31).
        """
        lengths = _integers(lengths, "lengths")
        if (lengths < 0).any():
            raise ValueError(f"lengths is {_abridged(lengths)}; expected integers >= 0")
        is_size = is_integer(world_size) and world_size > 0
        check("world_size", world_size, is_size, "the number of ranks that share the pack")
        is_rank = is_integer(rank) and 0 <= rank < world_size
        check("rank", rank, is_rank, f"0 <= rank < world_size = {world_size}")
        check("runs", runs, runs in (1, 2), "1 or 2")
        is_number = is_integer(pack) and 0 <= pack < MAX_PACKS
        check("pack", pack, is_number, "the number of a pack, from 0")
        rounded = lengths.sum(dtype=torch.float64).item()  # cannot overflow; exact up to 2**53
        most = INT32_MAX // runs * runs
        if rounded > world_size * most:
            raise ValueError(
                f"lengths is {_abridged(lengths)}, {rounded:.17g} tokens; {world_size} rank(s) "
                f"hold at most {most} each"
            )
        ends = lengths.cumsum(0)
        total = int(ends[-1]) if ends.numel() else 0
        slices = runs_of(total, rank, world_size, runs)
        pieces = torch.cat([_pieces_of_run(ends - lengths, ends, run) for run in slices])
        first_id = pack * 2 * MAX_DOCUMENTS_PER_RANK
        documents = cls.__new__(cls)
        if parents is None:
            documents._set_pieces(*pieces.unbind(1), torch.zeros(len(pieces), dtype=torch.int64))
        else:
            check("runs", runs, runs == 1, "1 with parents")
            documents._set_tree(pieces, lengths, parents)
        documents._pieces[:, 0] += first_id
        documents.crosses_ranks = True
        shared = [int(runs), parents is not None and [int(each) for each in parents]]
        if spans is not None:
            check("runs", runs, runs == 1 and parents is None, "1 with spans, and no parents")
            bounds = spans_of(spans, ends)
            documents._set_spans(bounds, slices[0])
            documents.spans._pieces[:, 0] += first_id
            shared.append(bounds.tolist())
        documents._pack = (lengths, rank, world_size, runs, pack)
        digest = digest_of(lengths.contiguous().numpy().tobytes() + repr(shared).encode())
        documents.pack_words = pack, world_size, digest
        if spans is not None:
            documents.spans.pack_words = documents.pack_words
        if runs == 2:
            documents.run_border = slices[0].stop - slices[0].start
            middle, begins = total // 2, ends - lengths
            for index in ((begins < middle) & (middle < ends)).nonzero()[:, 0].tolist():
                documents._cut_document = first_id + index, middle - int(begins[index])
        return documents

    def chunked(self, size: int) -> "Documents":
        """Return these documents cut into chunks of `size` tokens, counted from the start of each
        document, for layers whose queries see keys of their own chunk only (Llama 4).

        Rows and `position_ids` stay the same. Documents and their chunks are planned separately, as
        windows are: each by distca.plan, or by the first layer that attends to it. The same size
        returns the same object.

        Raises ValueError for a size below 1, for chunks and halves, and for documents with context
        rows, parents or spans.
        """
        is_size = is_integer(size) and 1 <= size <= INT32_MAX
        check("size", size, is_size, f"1 to {INT32_MAX} tokens")
        if self.chunk_size is not None or self._is_half or self._has_more_keys:
            raise ValueError(
                f"{self} cannot be cut into chunks; expected whole or sharded documents without "
                "context rows, parents or spans, which are neither chunks nor halves"
            )
        if size not in self._chunked:
            self._chunked[size] = self._cut_into_chunks(size)
        return self._chunked[size]

    def _cut_into_chunks(self, size: int) -> "Documents":
        if self._pack is None:
            chunks = Documents(_offsets_of(_lengths_of_chunks(self._pieces[:, 2], size)))
        else:
            lengths, *place = self._pack
            chunks = Documents.sharded(_lengths_of_chunks(lengths, size), *place)
        chunks.chunk_size, chunks._plans, chunks._uncut = size, self._plans, self._pieces
        return chunks

    def unplanned(self) -> "Documents":
        """Return the same documents without their plans, for another forward pass."""
        documents = copy.copy(self)
        documents._forget_plans()
        documents.spans = self.spans and self.spans.unplanned()
        return documents

    def _forget_plans(self) -> None:
        # Only distca.planning writes these. Compiled code must reach a plan through its arguments:
        # torch.compile would recompile a look-up by identity for the documents of each step.
        self._plans: dict = {}  # by plan_key; those of chunks, too
        self._local_plans: dict = {}  # by (window_size, device)
        self._halves: dict = {}  # by (cut, window_size)
        self._chunked: dict[int, Documents] = {}  # by size

    def plan_key(self, window_size: tuple[int, int]) -> tuple:
        """Return the key of the plan for these documents, among those of the same rows."""
        return (*window_size, self.chunk_size)

    def _set_pieces(self, index: Tensor, start: Tensor, length: Tensor, context: Tensor):
        self._pieces = torch.stack([index, start, length, context], dim=1)
        self._uncut = self._pieces  # of the documents that were cut into chunks
        self.crosses_ranks = False
        self.run_border: int | None = None  # row at which the second of two runs begins
        # Id of the document on both sides of the pack's middle (-1: none), and the number of its
        # tokens before the middle.
        self._cut_document = (-1, 0)
        self.num_context_rows = int(context.sum())
        self.num_tokens = int(length.sum()) - self.num_context_rows
        self.key_rows: Tensor | None = None  # see _set_tree
        self.spans: Documents | None = None  # see _set_spans
        self.chunk_size: int | None = None  # of documents that are chunks
        self._pack: tuple | None = None  # arguments of `sharded`
        # The number of the pack and of its ranks, and a digest of what else they must pass alike to
        # `sharded`.
        self.pack_words = NO_PACK
        self._is_half = False
        self._forget_plans()

    def _set_tree(self, held: Tensor, lengths: Tensor, parents: Sequence[int]) -> None:
        """Set pieces of documents with prefixes. `held`, int64 [num_pieces, 3] (document, start,
        length), are this rank's tokens in row order, `lengths` those of all documents.

        To the planner, a document's first keys are its ancestors': context rows, copied from the
        rows in `key_rows` on each rank that holds some.
        """
        prefixes = prefixes_of(lengths.tolist(), parents)
        rows = dict(zip(held[:, 0].tolist(), _offsets_of(held[:, 2]).tolist(), strict=False))
        own = {document: (start, length) for document, start, length in held.tolist()}
        pieces, parts = [], []
        for document, prefix in enumerate(prefixes):
            context = [(each, begin) for each, begin in prefix if own.get(each, (0, 0))[1] > 0]
            if lengths[document] == 0:
                context = []  # no queries see it
            for source, begin in [*context, (document, _end_of(prefix, lengths))]:
                if source in own:
                    start, length = own[source]
                    num_context = length if source != document else 0
                    pieces.append((document, begin + start, length, num_context))
                    parts.append(torch.arange(rows[source], rows[source] + length))
        self._set_pieces(*torch.tensor(pieces, dtype=torch.int64).reshape(-1, 4).unbind(1))
        is_own = self._pieces[:, 3] == 0
        self._uncut = self._pieces[is_own]
        self.key_rows = torch.cat([torch.arange(0), *parts])

    def _set_spans(self, bounds: Tensor, run: slice) -> None:
        """Set spans of a pack, as spans_of returns them; this rank holds the tokens `run`.

        To the planner, spans are documents of their own, of the rows in `span_rows`.
        """
        begins = bounds[:, 0]
        pieces = _pieces_of_run(begins, bounds[:, 1], run)
        index, start, length = pieces.unbind(1)
        self.spans = Documents.__new__(Documents)
        self.spans._set_pieces(index, start, length, torch.zeros_like(index))
        self.spans.crosses_ranks = self.crosses_ranks
        first = begins[index] + start - run.start - _offsets_of(length)[:-1]
        self.span_rows = torch.arange(self.spans.num_tokens) + first.repeat_interleave(length)
        self.longest_span = int((bounds[:, 1] - begins).max()) if len(bounds) else 0

    @property
    def _has_more_keys(self) -> bool:
        """Whether rows see more than earlier rows of their own document."""
        has_context = self.num_context_rows > 0 or self.key_rows is not None
        return has_context or self.spans is not None

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [num_pieces + 1], CPU: row at which each piece of a document begins."""
        pieces = self._pieces if self.key_rows is None else self._uncut
        return _offsets_of(pieces[:, 2]).to(torch.int32)

    def _offsets(self) -> Tensor:
        return _offsets_of(self._pieces[:, 2])

    @property
    def position_ids(self) -> Tensor:
        """int64 [num_tokens], CPU: position of each row in its document, for RoPE."""
        _, start, length, _ = self._uncut.unbind(1)
        shift = (start - _offsets_of(length)[:-1]).repeat_interleave(length)
        num_before = self.num_context_rows if self.key_rows is None else 0
        return (torch.arange(len(shift)) + shift)[num_before:]

    def halves(
        self, row: int, window_size: tuple[int, int] = (-1, 0)
    ) -> tuple["Documents", "Documents"]:
        """Return the documents of rows [0, row) and of the other rows, for attention in two calls.

        If a document has queries on both sides, those of the second half see keys of the first. The
        second half then begins with context rows: the last `second.num_context_rows` keys and
        values of the first half. Documents that cross ranks are halved between their two runs.

        Raises ValueError for a row outside [0, num_tokens], for documents with context rows,
        parents or spans, for chunks, and for a window to the right (or full) if a document is cut.
        For documents that cross ranks, also raises ValueError if they are in one run, if `row` is
        not their `run_border`, or if the window sees to the right.
        """
        is_in_one_run = self.crosses_ranks and self.run_border is None
        if self._has_more_keys or self.chunk_size is not None or is_in_one_run:
            raise ValueError(
                f"{self} cannot be halved; expected documents without context rows: whole ones, or "
                "two runs of a pack, as distca.shard_batch(..., runs=2) returns them; no chunks, "
                "parents or spans"
            )
        expected = f"0 to {self.num_tokens}, the number of tokens"
        check("row", row, 0 <= row <= self.num_tokens, expected)
        if self.run_border is not None:
            expected = f"{self.run_border}, at which the second run begins"
            check("row", row, row == self.run_border, expected)
        offsets = self._offsets()
        index, start, length, _ = self._pieces.unbind(1)
        first = (row - offsets[:-1]).clamp(min=0).minimum(length)
        is_cut = (first > 0) & (first < length)
        left, right = window_size
        if right != 0 and (self.crosses_ranks or is_cut.any()):
            where, or_row = "inside a document", ", or a row where a document begins"
            if self.crosses_ranks:  # equal on all ranks, even if a rank holds no cut document
                where, or_row = "between two runs", ""
            raise ValueError(
                f"row is {row}, {where}, and window_size {(left, right)} lets its first half see "
                f"keys of its second; expected a causal window, (-1, 0) or (W, 0){or_row}"
            )
        document, position = self._cut_document
        cut = torch.where(index == document, position, first)
        goes_on = (first < length) | (index == document)
        begin = begin_of_second_half(cut, goes_on, start + length, left)
        halves = [pieces_of_half(idx, start, length, first, begin) for idx in range(2)]
        held = offsets[:-1] < row, (offsets[1:] > row) | (halves[1][1] > 0)
        return self._part(index, *halves[0], held[0]), self._part(index, *halves[1], held[1])

    def _part(self, index: Tensor, start: Tensor, length: Tensor, context: Tensor, held: Tensor):
        part = Documents.__new__(Documents)
        part._set_pieces(index[held], start[held], length[held], context[held])
        part.crosses_ranks, part._is_half = self.crosses_ranks, True
        return part

    def pieces(self, rank: int) -> Tensor:
        """Return int64 [num_pieces, 5]: (rank, document, start, length, context rows). A document
        has the same id on all ranks."""
        pieces = self._pieces.clone()
        if not self.crosses_ranks:
            pieces[:, 0] += (rank + 1) * 2 * MAX_DOCUMENTS_PER_RANK
        return torch.nn.functional.pad(pieces, (1, 0), value=rank)

    def __repr__(self) -> str:
        kind = "sharded" if self.crosses_ranks else "whole"
        kind = kind if self.key_rows is None else f"{kind} (with parents)"
        kind = kind if self.spans is None else f"{kind} (with spans)"
        context = f", {self.num_context_rows} context rows" if self.num_context_rows else ""
        chunks = f", in chunks of {self.chunk_size}" if self.chunk_size is not None else ""
        return (
            f"Documents({self._pieces.shape[0]} {kind} pieces, {self.num_tokens} tokens{context}"
            f"{chunks})"
        )


def check_documents(documents: object) -> None:
    """Raise ValueError for what is not Documents, such as their offsets."""
    if not isinstance(documents, Documents):
        raise ValueError(
            f"documents is a {type(documents).__name__}, {documents!r:.80}; expected "
            "distca.Documents(cu_seqlens)"
        )


def runs_of(num_tokens: int, rank: int, world_size: int, runs: int) -> list[slice]:
    """Return the runs of a pack's tokens that `rank` holds: see Documents.sharded."""
    num_runs = runs * world_size
    return [
        slice(num_tokens * run // num_runs, num_tokens * (run + 1) // num_runs)
        for run in range(rank, num_runs, world_size)
    ]


def prefixes_of(lengths: list[int], parents: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return (ancestor, position at which it begins) of each document's ancestors, root first.
    Raises ValueError for parents that are not earlier documents."""
    indices = _integers(parents, "parents")
    before = torch.arange(indices.numel())
    if indices.numel() != len(lengths) or not ((indices >= -1) & (indices < before)).all():
        raise ValueError(
            f"parents is {_abridged(indices)} for {len(lengths)} documents; expected for each the "
            "index of an earlier one, or -1"
        )
    prefixes: list[list[tuple[int, int]]] = []
    for parent in indices.tolist():
        above = prefixes[parent] if parent >= 0 else []
        begin = _end_of(above, lengths)
        prefixes.append([*above, (parent, begin)] if parent >= 0 else [])
    return prefixes


def spans_of(spans: Tensor | Sequence[Sequence[int]], ends: Tensor) -> Tensor:
    """Return spans as int64 [num_spans, 2] on the CPU; documents end at `ends`. Raises ValueError
    unless they are pairs, in order, disjoint and not empty, each inside one document."""
    pairs = _integers(spans, "spans", num_dims=2).reshape(-1, 2)
    begins, last = pairs[:, 0].contiguous(), pairs[:, 1] - 1
    total = int(ends[-1]) if len(ends) else 0
    are_inside = bool((begins >= 0).all() and (begins <= last).all() and (last < total).all())
    are_apart = bool((begins[1:] > last[:-1]).all())
    documents = [torch.searchsorted(ends, rows, right=True) for rows in (begins, last)]
    if not (are_inside and are_apart and torch.equal(*documents)):
        raise ValueError(
            f"spans is {_abridged(pairs)}; expected pairs (begin, end) of tokens in order and "
            f"disjoint, from 0 to {total}, none empty, and each inside one document"
        )
    return pairs


def _end_of(prefix: list[tuple[int, int]], lengths: Sequence[int] | Tensor) -> int:
    """Return the length of a document's prefix."""
    return prefix[-1][1] + int(lengths[prefix[-1][0]]) if prefix else 0


def _offsets_of(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def _lengths_of_chunks(lengths: Tensor, size: int) -> Tensor:
    """Return the lengths of documents cut every `size` tokens; the last chunk may be shorter."""
    counts = ((lengths + size - 1) // size).clamp(min=1)  # an empty document stays one
    chunks = torch.full((int(counts.sum()),), size)
    chunks[counts.cumsum(0) - 1] = lengths - (counts - 1) * size
    return chunks


def _pieces_of_run(begins: Tensor, ends: Tensor, run: slice) -> Tensor:
    """Return the pieces of a run, int64 [num_pieces, 3] (document, start, length). Documents occupy
    the tokens [begins, ends) of the pack."""
    first = begins.clamp(run.start, run.stop)
    held = ends.clamp(run.start, run.stop) - first
    index = held.nonzero()[:, 0]
    return torch.stack([index, (first - begins)[index], held[index]], dim=1)


def begin_of_second_half(cut: Tensor, goes_on: Tensor, end: Tensor, left: int) -> Tensor:
    """Return the position at which the context of each document's second half begins. Queries of
    the second half begin at `cut` and see `left` keys before them (-1: all). Returns `end` for a
    document that does not go on after its first half."""
    context = cut if left < 0 else cut.clamp(max=left)
    return torch.where(goes_on, cut - context, end)


def pieces_of_half(
    idx: int, start: Tensor, length: Tensor, first: Tensor, begin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return start, length and number of context rows of pieces in half `idx`. The first half (0)
    has the `first` tokens of each piece (start, length). In the second half, positions count from
    `begin`, the result of begin_of_second_half."""
    if idx == 0:
        return start, first, torch.zeros_like(first)
    held = torch.maximum(start, begin)
    num_rows = (start + length - held).clamp(min=0)
    return held - begin, num_rows, (start + first - held).clamp(min=0)


def check_window(window_size: Sequence[int]) -> tuple[int, int]:
    """Return `window_size` as (left, right). Raises ValueError for anything else."""
    sides = tuple(window_size) if isinstance(window_size, Sequence) else ()
    if len(sides) != 2 or not all(is_integer(side) and -1 <= side <= INT32_MAX for side in sides):
        raise ValueError(
            f"window_size is {window_size!r:.80}; expected (left, right), two integers from -1, "
            f"which is no limit, to {INT32_MAX}"
        )
    return sides


def _integers(values: Tensor | Sequence, name: str, num_dims: int = 1) -> Tensor:
    """Return `values` as int64 on the CPU, of one dimension or, as pairs, of two. Raises ValueError
    for fractions."""
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} is {values!r:.80}; expected a list of integers") from error
    fractional = tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool
    is_empty = tensor.numel() == 0  # [] is a float tensor of one dimension
    is_shaped = tensor.dim() == num_dims and (num_dims == 1 or tensor.shape[1] == 2)
    if (fractional or not is_shaped) and not (is_empty and tensor.dim() in (1, num_dims)):
        kind = "one-dimensional list" if num_dims == 1 else "list of pairs"
        raise ValueError(
            f"{name} is {_abridged(tensor)}, {tensor.dtype}; expected a {kind} of integers"
        )
    return tensor.detach().to("cpu", torch.int64)


def _abridged(tensor: Tensor) -> str:
    values = tensor.flatten()
    shown = ", ".join(str(value) for value in values[:8].tolist())
    return f"[{shown}{', ...' if values.numel() > 8 else ''}] of shape {list(tensor.shape)}"
