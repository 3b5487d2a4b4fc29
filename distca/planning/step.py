"""Plan one step: its documents and, once a group uses halves, their halves too. Each rank cuts its
rows in two, and the tasks of a plan are cut there too."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca import ops
from distca.options import check, is_integer
from distca.planning import plan as plans
from distca.planning.cost import AttentionShape, device_of
from distca.planning.documents import (
    FROM_HERE,
    Documents,
    begin_of_second_half,
    check_documents,
    check_window,
    pieces_of_half,
)
from distca.planning.exchange import HEADER_WORDS, NUM_WORDS, check_headers, header_of
from distca.planning.halves import rows_of_first_half
from distca.planning.plan import CAUSAL, Plan
from distca.planning.solver import Problem, Solution, lay_out, tasks_of
from distca.ranks.session import Session, announced, halves_of, opened

NO_ROW = -1  # of a rank that cannot cut its documents

Cut = Callable[[Documents], int]
Halves = tuple[Documents, Documents]


def plan(
    documents: Documents,
    *,
    window_size: tuple[int, int] = CAUSAL,
    group: ProcessGroup | DeviceMesh | None = None,
    device: torch.device | str | None = None,
    shape: AttentionShape | None = None,
    ahead: bool = False,
) -> Plan:
    """Plan one step's attention over `group`, and attach the plan to `documents`.

    Collective: every rank calls it once per step, in the same order. `group` defaults to the group
    given to distca.init, else all ranks. `window_size` is (left, right), as in torch's varlen
    attention: (-1, 0) causal, (W, 0) sliding window, (-1, -1) full. `shape` is the attention that
    seconds and bytes are predicted for; it defaults to the last attention that ran, and before that
    to an 8B Llama. With `ahead` the call returns at once, a background thread plans, and the first
    use of the plan waits for it. If that is in compiled code, it breaks the graph: call `wait()` on
    the plan before.

    Raises ValueError on every rank, before any row is sent, if ranks disagree on version, options,
    step or window, or if documents that cross ranks do not fit together. Raises ValueError for a
    group of several stages of a pipeline.
    """
    session = opened(group)
    with announced(session):
        window_size = check_window(window_size)
        check_documents(documents)
        is_shape = shape is None or isinstance(shape, AttentionShape)
        check("shape", shape, is_shape, "distca.AttentionShape(...) or None")
        session.place()  # servers do not plan
        if session.pools_stages:
            raise ValueError(
                "the group has several stages of a pipeline; expected a schedule of "
                "distca.integrations.pipelining, which plans the micro-batches of each tick "
                'together, or distca.init(mesh["dp"]) for stages that balance apart'
            )
        device = device_of(session.device_type if device is None else device, "the plan")
    step_plan = plans.submit(session, documents, window_size, device, shape)
    spans = documents.spans
    if spans is not None and spans.plan_key(FROM_HERE) not in spans._plans:
        plans.submit(session, spans, FROM_HERE, device, shape)
    # All ranks must do this for the same windows, wherever documents are cut on this rank.
    if session.cut is not None and window_size[1] == 0 and documents.chunk_size is None:
        try:
            row = session.cut(documents)
            halves = documents.halves(row, window_size)
        except Exception:  # plan_halves raises it; no rank gets halves
            row, halves = NO_ROW, ()
        _submit_halves(session, documents, row, halves, window_size, device)
    return step_plan if ahead else step_plan.wait()


def row_of(cut: Cut, documents: Documents) -> int:
    """Return the row at which to cut documents. Raises ValueError if `cut` returns no row."""
    row, most = cut(documents), documents.num_tokens
    if not (is_integer(row) and 0 <= row <= most):
        raise ValueError(f"cut is {row!r:.80} for {documents}; expected 0 to {most}")
    return row


def plan_halves(
    documents: Documents, cut: Cut, window_size: tuple[int, int], device: torch.device
) -> Halves:
    """Return the halves of documents, cut at row cut(documents). The planner thread gives each half
    its part of the documents' plan. Collective on the first call with this function and window.
    From then on `plan` plans halves too.

    Raises ValueError for a group with servers, and as `Documents.halves` does; the other ranks of
    the group are told.
    """
    halves = documents._halves.get((cut, window_size))
    if halves is not None:
        return halves
    session = opened(plans.group_of(documents))
    check("servers", session.servers, not session.servers, "none with distca.PingPong")
    try:
        row = cut(documents)
        halves = documents.halves(row, window_size)
    except Exception as error:
        session.announce(error)
        raise
    session.cut = cut
    _submit_halves(session, documents, row, halves, window_size, device)
    return halves


def _submit_halves(
    session: Session,
    documents: Documents,
    row: int,
    halves: Sequence[Documents],
    window_size: tuple[int, int],
    device: torch.device,
) -> None:
    """Take part in planning the halves of all ranks, and attach plans to this rank's."""
    whole = documents._plans.get(documents.plan_key(window_size))
    if whole is None:
        whole = plans.submit(session, documents, window_size, device, None)
    its_sessions = halves_of(session)
    problems = [plans.next_problem(each, window_size, device) for each in its_sessions]
    rows = session.planner.submit(_exchange_rows, session, problems[0], row)
    for idx, half in enumerate(halves):
        pending = session.planner.submit(_solve_half, session, problems[idx], idx, whole, rows)
        half._plans[half.plan_key(window_size)] = Plan(pending, device, its_sessions[idx])
    if halves:
        documents._halves[session.cut, window_size] = halves


def _exchange_rows(session: Session, problem: Problem, row: int) -> Tensor:
    """Return the row at which each rank cuts its documents, int64 [num_ranks]. Runs on the planner
    thread."""
    step = -1 - problem.step  # no plan has it: a rank that plans another step instead is found out
    header = header_of(step, session.options, problem.window_size)
    words = torch.tensor([*header, *[0] * (NUM_WORDS - HEADER_WORDS), row])
    gathered = ops.gather(words, session.group_name, problem.step)
    headers = torch.stack([each[: words.numel()] for each in gathered])
    check_headers(headers)
    return headers[:, -1]


def _solve_half(
    session: Session, problem: Problem, idx: int, whole: Plan, rows: Future
) -> Solution:
    """Return a half's part of a plan, with the figures of the whole plan. Runs on the planner
    thread."""
    solution, cuts = whole.solution(), rows.result()
    if (cuts == NO_ROW).any():
        raise ValueError(
            f"distca: rank(s) {(cuts == NO_ROW).nonzero()[:, 0].tolist()} cannot cut their "
            "documents in two; see the error there"
        )
    tasks = tasks_of(solution.encoded)
    held = half_of(solution.pieces, tasks, cuts, problem.window_size, idx)
    shape, rest = solution.shape, (1, solution.early_part)  # rows of halves travel in one part
    laid_out = lay_out(problem, *held, session.options, shape, *rest)
    plans.agree_on_plan(halves_of(session)[idx], problem, laid_out[0])
    return Solution(*laid_out, *held, shape, *rest, solution.report)


def half_of(
    pieces: Tensor, tasks: Tensor, rows: Tensor, window_size: tuple[int, int], idx: int
) -> tuple[Tensor, Tensor]:
    """Return (pieces, plan) of the first half (idx 0) or the second, as torch.ops.distca.plan takes
    and returns them. Queries stay on their servers, which are balanced over both halves together.

    `pieces`, int64 [num_pieces, 5], are those of all ranks, in row order and without context.
    `tasks`, [num_tasks, 5], are those of a plan for them. The halves of rank r are its rows before
    rows[r] and the other rows, as Documents.halves cuts them.
    """
    rank, document, start, length, _ = pieces.unbind(1)
    first = rows_of_first_half(pieces, rows)
    document_of = torch.unique(document, return_inverse=True)[1]
    cut, total = (_sum_by(document_of, each) for each in (first, length))
    begin = begin_of_second_half(cut, cut < total, start + length, window_size[0])
    held = torch.stack([rank, document, *pieces_of_half(idx, start, length, first, begin)], dim=1)

    index, q_begin, q_end, server, is_kept = tasks.unbind(1)
    piece = _first_pieces(start, length)[index]
    if idx == 0:
        q_end = torch.minimum(q_end, cut[piece])
    else:
        shift = begin[piece]
        q_begin, q_end = torch.maximum(q_begin, cut[piece]) - shift, q_end - shift
    new_index = torch.zeros_like(document)
    own_first = _first_pieces(held[:, 2], held[:, 3])
    new_index[document_of[own_first]] = torch.arange(len(own_first))
    index = new_index[document_of[piece]]
    own = torch.stack([index, q_begin, q_end, server, is_kept], dim=1)[q_begin < q_end]
    # Context may begin on another rank than its document, which changes the order of documents.
    own = own[torch.argsort(own[:, 3] * len(pieces) + own[:, 0], stable=True)]
    return held, ops.plan_of_tasks(held, own, rows.numel(), *window_size)


def _sum_by(document_of: Tensor, counts: Tensor) -> Tensor:
    """Return the sum of `counts` over all pieces of each piece's document, [num_pieces]."""
    return torch.zeros_like(counts).index_add_(0, document_of, counts)[document_of]


def _first_pieces(start: Tensor, length: Tensor) -> Tensor:
    """Return the index of each document's first piece, in a plan's order of documents."""
    return ((start == 0) & (length > 0)).nonzero()[:, 0]
