"""All ranks of a run, including servers that are not in the default process group."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist

from distca.options import Options
from distca.ranks.own_groups import OwnGroups
from distca.watching.settings import Watching

LOOK_S = 0.1  # from one look for a session to the next
ENDED = "ended"


@dataclass
class World:
    """Ranks that meet in a store of their own, beside the default process group."""

    store: dist.Store
    rank: int
    num_ranks: int
    servers: tuple[int, ...]
    num_sessions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.own_groups = OwnGroups("distca", self.store, self.rank)

    def members(self) -> dict:
        """Return the fields of a session that name its ranks."""
        names = ("rank", "num_ranks", "servers", "own_groups")
        return {"world": self, **{name: getattr(self, name) for name in names}}

    def announce(self, backend: str, options: Options, watching: Watching) -> None:
        """Tell servers how the ranks that train open their next session."""
        session = {"backend": backend, "options": vars(options), "watching": vars(watching)}
        if self.rank == 0:
            self.store.set(f"session {self.num_sessions}", json.dumps(session))
        self.num_sessions += 1

    def next_session(self) -> dict | None:
        """Wait, on a server, for the next session. Return None if the ranks that train have
        ended."""
        key = f"session {self.num_sessions}"
        self.num_sessions += 1
        try:
            while not self.store.check([key]):
                if self.store.check([ENDED]):
                    return None
                time.sleep(LOOK_S)
            return json.loads(self.store.get(key))
        except dist.DistError:  # the store has ended with the process that held it
            return None

    def end(self) -> None:
        """Tell servers that no session follows."""
        if self.rank == 0:
            self.store.set(ENDED, "")


def check_servers(servers: Sequence[int], num_ranks: int, options: Options) -> None:
    """Raise ValueError unless `servers` are ranks of a group that can serve under these options."""
    if not servers:
        return
    are_ranks = all(type(rank) is int and 0 < rank < num_ranks for rank in servers)
    if not are_ranks or len(set(servers)) < len(servers):
        raise ValueError(
            f"servers is {tuple(servers)}; expected ranks from 1 to {num_ranks - 1}, each once. "
            "Rank 0 trains"
        )
    speeds = options.speeds(num_ranks) or (1.0,) * num_ranks
    idle = [rank for rank in servers if speeds[rank] == 0]
    if not options.enabled or idle:
        setting = f"server_speeds {options.server_speeds!r}" if idle else "enabled False"
        raise ValueError(
            f"servers is {tuple(servers)}, but under {setting} rank(s) {idle or list(servers)} "
            "compute nothing: the ranks that hold tokens would compute all attention. Give every "
            "server a speed, or have no servers"
        )
