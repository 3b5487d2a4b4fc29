"""Process groups that share attention: opened once, found again by group."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from distca import ops
from distca.options import Options, check
from distca.ranks import groups
from distca.ranks.fsdp_traffic import ModelTraffic
from distca.ranks.hiding import WorkBeforeAttention
from distca.ranks.leaving import failure_under_way, leave, watch_exits
from distca.ranks.links import Links, connect
from distca.ranks.opening import (
    destroy_groups,
    groups_of,
    measure_links,
    measures_links,
    open_groups,
    open_transport_again,
)
from distca.ranks.own_groups import OwnGroups, own_groups_of
from distca.ranks.pace import Pace
from distca.ranks.peers import Way
from distca.ranks.planner_thread import PATIENCE_S, PlannerThread
from distca.ranks.waits import Waits
from distca.ranks.world import World, check_servers
from distca.watching.monitor import Monitor
from distca.watching.settings import Watching
from distca.watching.trace import save_spans

TIMED_EVERY = 10  # steps, if log_every is 0
NOT_TIMED = (-1, -1)


@dataclass
class Session:
    """This rank's part in a group. Groups of its own keep its traffic apart from the model's."""

    options: Options
    group: ProcessGroup | None  # that init was given; None on the launcher's servers
    rank: int
    num_ranks: int
    data: ProcessGroup | None = None  # rows travel here; None with one rank
    planning: ProcessGroup | None = None  # gloo, for pieces, by the planner thread alone
    control: ProcessGroup | None = None  # gloo, for agreement on calls that were not announced
    node: ProcessGroup | None = None  # gloo, of the ranks of this node; None unless hybrid
    servers: tuple[int, ...] = ()  # ranks that run no model
    notices: ProcessGroup | None = None  # gloo, of rank 0 and the servers; None on other ranks
    world: World | None = None  # the launcher's: all ranks, with servers that `group` lacks
    own_groups: OwnGroups | None = None  # open all groups above; None: torch.distributed does
    backend: str = ""  # of rows, "cpu:gloo,cuda:nccl"
    way: Way = Way()  # how rows travel, if the attention allows it
    links: Links = Links()  # as measured when it was opened
    attention_seconds: float | None = None  # see speed.measure; None: not measured
    waits: Waits = field(default_factory=Waits)
    hiding: WorkBeforeAttention = field(default_factory=WorkBeforeAttention)
    traffic: ModelTraffic = field(default_factory=ModelTraffic)
    pace: Pace = field(init=False)
    num_plans: int = 0
    planner: PlannerThread = field(init=False)
    halves: list["Session"] = field(default_factory=list)  # of a step's halves: see halves_of
    cut: Callable | None = None
    """Returns the row that cuts documents into halves. Set on first use; then `distca.plan` plans
    halves too."""
    watching: Watching = Watching()
    monitor: Monitor | None = None  # records every plan, on rank 0 if `watching` asks for it
    timed_step: int | None = None  # whose attention is being timed
    times_us: tuple[int, int] = NOT_TIMED
    """Latest times in microseconds: of attention, and of the waits for other ranks in it."""
    pools_stages: bool = False  # ranks hold stages of a pipeline, whose schedule makes all plans
    has_failed: bool = False  # this rank has told the others of an error

    def __post_init__(self) -> None:
        self.pace = Pace(self.num_ranks)
        self.planner = PlannerThread(PATIENCE_S if self.device_type == "cuda" else 0.0)

    def time_step(self, step: int) -> None:
        """Keep the times of a timed step once they are known. Time the attention of step `step` if
        it is due and no other step is being timed."""
        times = [] if self.timed_step is None else ops.attention_times(self.group_name)
        if times:
            self.times_us, timed, self.timed_step = tuple(times), self.timed_step, None
            if self._keeps_times():
                self.planner.save(f"times of step {timed}", self._save_spans, timed)
        every = self.watching.log_every or TIMED_EVERY
        if self.watching.is_on and self.timed_step is None and step % every == 0:
            ops.watch_step(self.group_name, step)
            self.timed_step = step

    def times_ticks(self, step: int) -> bool:
        """Return whether to time the ticks of step `step` of a pipeline."""
        return self._keeps_times() and step % (self.watching.log_every or TIMED_EVERY) == 0

    def _keeps_times(self) -> bool:
        """Return whether this group's ranks save times in the run's folder. Only the group with
        rank 0 does."""
        if self.watching.run_dir is None:
            return False
        return self.world is not None or 0 in dist.get_process_group_ranks(self.group)

    def _save_spans(self, step: int) -> None:
        save_spans(self.watching.run_dir, self.rank, step, *ops.spans(self.group_name))

    @property
    def parts(self) -> list["Session"]:
        """The sessions that have groups of their own for rows: those of the halves, and this
        one."""
        return [each for each in (*self.halves, self) if each.data is not None]

    @property
    def group_name(self) -> str:
        """Name of the data plane's group, as operators take it; empty with one rank."""
        return self.data.group_name if self.data is not None else ""

    @property
    def name(self) -> str:
        """Name of the group that init was given; empty on the launcher's servers."""
        return self.group.group_name if self.group is not None else ""

    def place(self) -> tuple[int, int]:
        """Return this rank's number among the ranks that train, and their number. Raises ValueError
        on a server."""
        ranks = [rank for rank in range(self.num_ranks) if rank not in self.servers]
        expected = f"a rank that trains, one of {ranks}; servers call distca.serve"
        check("rank", self.rank, self.rank in ranks, expected)
        return ranks.index(self.rank), len(ranks)

    @property
    def device_type(self) -> str:
        """Where this group's attention runs by default."""
        if not torch.cuda.is_available():
            return "cpu"
        return "cuda" if "nccl" in self.backend else "cpu"

    def announce(self, error: BaseException, place: str = "") -> None:
        """Tells the other ranks what went wrong on this one, and at which place, even if they are
        waiting in a call."""
        self.has_failed = True
        where = f"{place}: " if place and not str(error).startswith(place) else ""
        message = f"{where}{type(error).__name__}: {error}".removesuffix(": ")
        for each in self.parts:
            ops.announce_failure(each.group_name, message)


@contextlib.contextmanager
def announced(session: Session | None) -> Iterator[None]:
    """Announce a ValueError that is raised in this context to the group. It may concern this rank's
    batch alone, and the other ranks are about to wait for its plan."""
    try:
        yield
    except ValueError as error:
        if session is not None:
            session.announce(error)
        raise


_sessions: dict[str, Session] = {}  # by name of the group that init was given
_has_opened = False
_options, _watching = Options(), Watching()  # for arguments of `init` that are None
_world: World | None = None  # of sessions over all ranks of the default group


def configure(options: Options, watching: Watching | None = None) -> None:
    """Set the defaults of `init`. `watching` defaults to no records. The launcher calls this."""
    global _options, _watching
    _options, _watching = options, watching or Watching()


def join_world(world: World) -> None:
    """Let sessions include servers that are not in the default group. The launcher calls this."""
    global _world
    _world = world


def configured() -> Options:
    """Return the options last passed to `configure`."""
    return _options


def options_of(group: ProcessGroup | DeviceMesh | None = None) -> Options:
    """Return the options of the open session of `group`, else those that `configure` was given."""
    session = find(group)
    return _options if session is None else session.options


def is_balanced(is_training: bool, group: ProcessGroup | DeviceMesh | None = None) -> bool:
    """Return whether ranks share the attention of a pass that runs now. `is_training`: its model is
    in training mode."""
    return (is_training and torch.is_grad_enabled()) or options_of(group).balance_no_grad


def init(
    group: ProcessGroup | DeviceMesh | None = None,
    options: Options | None = None,
    watching: Watching | None = None,
    servers: Sequence[int] = (),
) -> Session:
    """Open `group` for balanced attention, and make it the default of all calls without a group.
    Collective over the group. For a group that is open already, return its session.

    `group` holds the ranks with different tokens of the same layer: the data parallel ranks of one
    tensor and pipeline parallel coordinate. Pass a ProcessGroup or a DeviceMesh with such axes only
    (`mesh["dp"]`, or the replicas and shards of HSDP). `mesh["pp", "dp"]` pools the attention of
    all stages of a pipeline, for `distca.integrations.pipelining`. None means all ranks, or the
    group that init was given before. `watching` configures logs and records. `options` and
    `watching` default to the values passed to `configure`. `servers` are ranks of `group` that run
    no model: they call `distca.serve` next, and compute attention for the others. Rank 0 is not one
    of them. Servers hold no tokens and take no part in `distca.plan`. On CUDA, set the current
    device first: init measures the links between the current devices of the ranks, unless `options`
    name their bandwidths.

    Raises RuntimeError if torch.distributed is not initialised. Raises ValueError if the group is
    open with other options or servers, if the mesh has an axis whose ranks share tokens, or if
    `servers` cannot serve under these options.
    """
    session = opened(group, options, watching, servers)
    if group is not None:
        groups.set_default(session.group)
    return session


def opened(
    group: ProcessGroup | DeviceMesh | None = None,
    options: Options | None = None,
    watching: Watching | None = None,
    servers: Sequence[int] = (),
) -> Session:
    """Return the session of `group` as `init` does, without changing the default group."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "distca.init: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() first (under torchrun)"
        )
    for name, setting, kind in (("options", options, Options), ("watching", watching, Watching)):
        expected = f"a distca.{kind.__name__}, or None"
        check(name, setting, setting is None or isinstance(setting, kind), expected)
    pools_stages, group = groups.has_stages(group), groups.resolve(group)
    session = find(group)
    if session is not None:
        session.pools_stages |= pools_stages
        if servers and tuple(servers) != session.servers:
            raise ValueError(
                f"servers is {tuple(servers)}, but this group was opened with {session.servers}; "
                "call distca.close(group) first"
            )
        for name, asked in (("options", options), ("watching", watching)):
            current = getattr(session, name)
            if asked not in (None, current):
                now = vars(current)
                names = [each for each, value in vars(asked).items() if value != now[each]]
                new, old = (
                    ", ".join(f"{each}={getattr(values, each)!r}" for each in names)
                    for values in (asked, current)
                )
                raise ValueError(
                    f"{name} have {new}, but this group was opened with {old}; call "
                    "distca.close(group) first"
                )
        return session
    session = Session(
        options or _options,
        group,
        dist.get_rank(group),
        dist.get_world_size(group),
        servers=tuple(servers),
        backend=str(dist.get_backend_config(group)),
        watching=watching or _watching,
        pools_stages=pools_stages,
    )
    if _world is not None:
        _check_trains_with(_world, session)
        session = replace(session, **_world.members())
    elif session.num_ranks < dist.get_world_size():
        session.own_groups = own_groups_of(group)
    if _world is not None:
        _world.announce(session.backend, session.options, session.watching)
    _start(session)
    return session


def serve_in_world() -> Session | None:
    """Open the next session of the launcher's servers. Return None if the ranks that train have
    ended."""
    described = _world.next_session()
    if described is None:
        return None
    options, watching = Options(**described["options"]), Watching(**described["watching"])
    session = Session(
        options,
        None,
        **_world.members(),
        backend=described["backend"],
        watching=watching,
    )
    _start(session)
    return session


def _check_trains_with(world: World, session: Session) -> None:
    num_ranks = world.num_ranks - len(world.servers)
    if session.servers or session.num_ranks != num_ranks:
        raise ValueError(
            f"group has {session.num_ranks} ranks and servers {session.servers}; expected all "
            f"{num_ranks} ranks that train and no servers: those of attention_servers serve them"
        )


def _start(session: Session) -> None:
    if session.num_ranks == 1:
        check_servers(session.servers, session.num_ranks, session.options)
    else:
        try:
            open_groups(session)
        except ValueError:  # on every rank
            if session.control is not None:
                destroy_groups(session)
            raise
    global _has_opened
    _sessions[session.name], _has_opened = session, True
    watch_exits(_sessions.values)
    try:
        if session.watching.is_on and session.group is not None and dist.get_rank() == 0:
            session.monitor = Monitor(session.watching)
        if session.num_ranks > 1 and measures_links(session):
            measure_links(session)
    except BaseException:
        close_session(session)  # tells the others
        raise


def has_opened() -> bool:
    """Return whether this process has ever opened a session."""
    return _has_opened


def halves_of(session: Session) -> list[Session]:
    """Return the sessions of a step's two halves. The first call opens them and is collective.

    A group runs its calls in order, and rows of one half must not wait for results of the other. So
    each half has its own groups for rows and agreement. Plans are exchanged on the session's group.

    Both halves use the session's transport. Each half reserves half of the session's
    peer_memory_gb.
    """
    options = replace(session.options, peer_memory_gb=session.options.peer_memory_gb / 2)
    while len(session.halves) < 2:
        half = Session(options, session.group, session.rank, session.num_ranks)
        half.backend, half.own_groups = session.backend, session.own_groups
        half.planning, half.planner = session.planning, session.planner
        open_groups(half)
        session.halves.append(half)
        if measures_links(half):
            connect(half, torch.device(half.device_type))
            open_transport_again(half)
    return session.halves


def find(group: ProcessGroup | DeviceMesh | None = None) -> Session | None:
    """Return the open session of `group` (default: as for `init`), or None."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = groups.resolve(group)
    # After torch.distributed was ended and initialised again, a new group has the old one's name.
    return next((each for each in _sessions.values() if each.group is group), None)


def all_open() -> list[Session]:
    """Return the open sessions, those of halves included, whose rows travel."""
    return [part for session in _sessions.values() for part in session.parts]


def close(group: ProcessGroup | DeviceMesh | None = None) -> None:
    """End the session of `group` (default: as for `init`). A group that is not open is left alone.

    Every rank calls it, and waits at most a moment for the others. If an exception is being
    handled, as in a `finally` block, the other ranks are told of it. Ranks that go on after a rank
    has closed get an error that names it.
    """
    session = find(group)
    if session is not None:
        close_session(session)


def close_session(session: Session) -> None:
    """Close an open session, as `close` does."""
    error = failure_under_way()
    if error is not None:
        session.announce(error)
    del _sessions[session.name]
    if session.group is groups.resolve():
        groups.set_default(None)
    leave(session, "has closed its session")
    if session.data is None:
        return
    if any(ops.may_be_busy(each.group_name) for each in session.parts):
        # A gloo group cannot end before its exchanges do, not even those that were given up.
        nodes = [each.node for each in session.parts]
        own = [*groups_of(session), *nodes, session.notices]
        if "nccl" in session.backend:
            own = [each for each in own if each not in [part.data for part in session.parts]]
        ops.keep_groups([each.group_name for each in own if each is not None])
    for each in session.parts:
        ops.close_session(each.group_name)
    destroy_groups(session)
