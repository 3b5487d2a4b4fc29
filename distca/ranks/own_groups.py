"""Process groups that torch.distributed does not count, so only their own ranks open them.

torch names a group by how many groups a rank has opened. If only some ranks opened a group by
torch.distributed.new_group, the next group of all ranks would get different names, and ranks would
wait for each other under these.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import ProcessGroup

from distca import _torch_private


@dataclass
class OwnGroups:
    """Opens groups of ranks that meet in a store. All ranks that share `name` open groups in the
    same order. Groups that they open at the same time have no rank in common."""

    name: str
    store: dist.Store
    rank: int
    num_opened: int = field(default=0, init=False)

    def open(
        self, ranks: Sequence[int], backend: str, timeout: timedelta, options=None
    ) -> ProcessGroup:
        """Open a group of `ranks`, which include this one. `backend` is as for
        torch.distributed.init_process_group, and `options` are those of NCCL."""
        self.num_opened += 1
        name = f"{self.name}/{self.num_opened}/{ranks[0]}"
        place = (ranks.index(self.rank), len(ranks))
        return _torch_private.new_group(self.store, name, *place, backend, timeout, options)


_of_groups: weakref.WeakKeyDictionary[ProcessGroup, OwnGroups] = weakref.WeakKeyDictionary()


def own_groups_of(group: ProcessGroup) -> OwnGroups:
    """Return what opens groups among the ranks of `group`, numbered as in `group`."""
    if group not in _of_groups:
        name = f"distca/{group.group_name}"
        _of_groups[group] = OwnGroups(name, group.get_group_store(), group.rank())
    return _of_groups[group]
