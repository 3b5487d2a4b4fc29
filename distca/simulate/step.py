"""A step's documents, and the plans of it that several systems share."""

from functools import cached_property

import numpy as np

from distca.planning.packs import Pack
from distca.simulate.disaggregated import Work, cluster_of, pack_on, ping_pong, plan, work_of
from distca.simulate.machine import BACKWARD, FORWARD
from distca.simulate.packing import Documents
from distca.simulate.pipeline import IDLE, micro_batch_of
from distca.simulate.scenario import Scenario

PASSES = (FORWARD, BACKWARD)
LINK_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the ratio of linear work to attention


class Step:
    """A step's documents, and the plans that several systems share."""

    def __init__(self, scenario: Scenario, documents: Documents) -> None:
        self.scenario = scenario
        self.documents = documents
        self.cost = scenario.attention_cost()

    def micro_batch(self, i: int) -> Documents:
        packs = self.scenario.packs
        return self.documents.of_packs(i * packs, (i + 1) * packs)

    @property
    def even_tokens(self) -> np.ndarray:
        """[micro_batches, groups]"""
        shape = (self.scenario.micro_batches, self.scenario.groups)
        return np.full(shape, self.scenario.tokens)

    def work(
        self, pack: Pack, speeds: tuple[float, ...] | None = None, link_factor: float = 1.0
    ) -> Work:
        cluster = cluster_of(self.scenario, pack.num_ranks, speeds, link_factor)
        return work_of(pack, plan(self.scenario, pack, cluster, self.cost), self.cost)

    def work_ping_pong(self, pack: Pack, tokens: np.ndarray) -> Work:
        """Exchanges may last as long as the linear work that hides them; the planner weighs them
        against attention. So it is told of links that are faster by up to the ratio of the two, and
        the plan with the shortest layer is taken. `tokens` [ranks] are those of `pack`."""
        linear = self.scenario.linear_seconds(tokens)
        lengths = pack.lengths
        attention = self.cost.seconds(np.zeros_like(lengths), lengths).sum() / pack.num_ranks
        factors = {max(1.0, share * sum(linear).max() / attention) for share in LINK_SHARES}

        def layer_seconds(work: Work) -> float:
            times = [ping_pong(self.scenario, work, idx, linear[idx])[0] for idx in PASSES]
            return sum(float(each.sum(axis=0).max()) for each in times)

        works = [self.work(pack, link_factor=factor) for factor in sorted(factors)]
        return min(works, key=layer_seconds)

    @cached_property
    def _packs_in_place(self) -> list[Pack]:
        """By micro-batch, over the groups of a stage; packs lie where they were drawn."""
        return self._packs_on(np.arange(self.scenario.groups))

    def _packs_on(self, groups: np.ndarray) -> list[Pack]:
        num_groups, count = self.scenario.groups, self.scenario.micro_batches
        return [pack_on(self.micro_batch(i).lengths, groups, num_groups) for i in range(count)]

    @cached_property
    def in_place(self) -> list[Work]:
        return [self.work(pack) for pack in self._packs_in_place]

    @cached_property
    def in_place_ping_pong(self) -> list[Work]:
        return list(map(self.work_ping_pong, self._packs_in_place, self.even_tokens))

    @cached_property
    def is_server(self) -> np.ndarray:
        """[groups] Dedicated servers, evenly spread so that nodes have alike many."""
        every = round(1 / self.scenario.server_share)
        return np.arange(1, self.scenario.groups + 1) % every == 0

    @cached_property
    def _packs_beside_servers(self) -> list[Pack]:
        """By micro-batch; dedicated servers hold no tokens."""
        return self._packs_on(np.flatnonzero(~self.is_server))

    @property
    def home_tokens(self) -> np.ndarray:
        """[micro_batches, groups] beside dedicated servers."""
        return np.stack([pack.tokens for pack in self._packs_beside_servers])

    @cached_property
    def dedicated(self) -> list[Work]:
        speeds = tuple(self.is_server.astype(float).tolist())
        return [self.work(pack, speeds) for pack in self._packs_beside_servers]

    @property
    def tokens_of_ticks(self) -> np.ndarray:
        """[forward ticks, stages * groups]"""
        stages = range(self.scenario.pp)
        busy = [
            [micro_batch_of(self.scenario, FORWARD, tick, stage) != IDLE for stage in stages]
            for tick in range(self.scenario.micro_batches + self.scenario.pp - 1)
        ]
        return np.repeat(np.array(busy) * self.scenario.tokens, self.scenario.groups, axis=1)

    @cached_property
    def _packs_of_ticks(self) -> list[Pack]:
        """By forward tick, over all stages. Backward ticks have the same, mirrored."""
        scenario = self.scenario
        packs = []
        for tick, tokens in enumerate(self.tokens_of_ticks):
            order = (micro_batch_of(scenario, FORWARD, tick, i) for i in range(scenario.pp))
            lengths = [self.micro_batch(i).lengths for i in order if i != IDLE]
            packs.append(pack_on(np.concatenate(lengths), np.flatnonzero(tokens), tokens.size))
        return packs

    @cached_property
    def of_ticks(self) -> list[Work]:
        return [self.work(pack) for pack in self._packs_of_ticks]

    @cached_property
    def of_ticks_ping_pong(self) -> list[Work]:
        return list(map(self.work_ping_pong, self._packs_of_ticks, self.tokens_of_ticks))
