"""A step's documents, and the plans of it that several systems share."""

from functools import cached_property

import numpy as np

from distca.simulate.disaggregated import Homes, Work, cluster_of, ping_pong, plan, work_of
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
        self, homes: Homes, speeds: tuple[float, ...] | None = None, link_factor: float = 1.0
    ) -> Work:
        cluster = cluster_of(self.scenario, homes.num_ranks, speeds, link_factor)
        return work_of(homes, plan(self.scenario, homes, cluster, self.cost), self.cost)

    def work_ping_pong(self, homes: Homes, tokens: np.ndarray) -> Work:
        """Exchanges may last as long as the linear work that hides them; the planner weighs them
        against attention. So it is told of links that are faster by up to the ratio of the two, and
        the plan with the shortest layer is taken. `tokens` [ranks] are those of `homes`."""
        linear = self.scenario.linear_seconds(tokens)
        lengths = np.bincount(homes.document, homes.length).astype(np.int64)
        attention = self.cost.seconds(np.zeros_like(lengths), lengths).sum() / homes.num_ranks
        factors = {max(1.0, share * sum(linear).max() / attention) for share in LINK_SHARES}

        def layer_seconds(work: Work) -> float:
            times = [ping_pong(self.scenario, work, idx, linear[idx])[0] for idx in PASSES]
            return sum(float(each.sum(axis=0).max()) for each in times)

        works = [self.work(homes, link_factor=factor) for factor in sorted(factors)]
        return min(works, key=layer_seconds)

    @cached_property
    def _homes_in_place(self) -> list[Homes]:
        """By micro-batch, over the groups of a stage; packs lie where they were drawn."""
        groups = np.arange(self.scenario.groups)
        count = self.scenario.micro_batches
        return [Homes.of(self.micro_batch(i).lengths, groups) for i in range(count)]

    @cached_property
    def in_place(self) -> list[Work]:
        return [self.work(homes) for homes in self._homes_in_place]

    @cached_property
    def in_place_ping_pong(self) -> list[Work]:
        held = zip(self._homes_in_place, self.even_tokens, strict=True)
        return [self.work_ping_pong(homes, tokens) for homes, tokens in held]

    @cached_property
    def is_server(self) -> np.ndarray:
        """[groups] Dedicated servers, evenly spread so that nodes have alike many."""
        every = round(1 / self.scenario.server_share)
        return np.arange(1, self.scenario.groups + 1) % every == 0

    @cached_property
    def _homes_beside_servers(self) -> list[Homes]:
        """By micro-batch; dedicated servers hold no tokens."""
        groups, count = self.scenario.groups, self.scenario.micro_batches
        homes = np.flatnonzero(~self.is_server)
        return [Homes.of(self.micro_batch(i).lengths, homes).within(groups) for i in range(count)]

    @property
    def home_tokens(self) -> np.ndarray:
        """[micro_batches, groups] beside dedicated servers."""
        return np.stack([homes.tokens() for homes in self._homes_beside_servers])

    @cached_property
    def dedicated(self) -> list[Work]:
        speeds = tuple(self.is_server.astype(float).tolist())
        return [self.work(homes, speeds) for homes in self._homes_beside_servers]

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
    def _homes_of_ticks(self) -> list[Homes]:
        """By forward tick, over all stages. Backward ticks have the same, mirrored."""
        scenario = self.scenario
        found = []
        for tick, tokens in enumerate(self.tokens_of_ticks):
            order = (micro_batch_of(scenario, FORWARD, tick, i) for i in range(scenario.pp))
            lengths = [self.micro_batch(i).lengths for i in order if i != IDLE]
            homes = Homes.of(np.concatenate(lengths), np.flatnonzero(tokens))
            found.append(homes.within(tokens.size))
        return found

    @cached_property
    def of_ticks(self) -> list[Work]:
        return [self.work(homes) for homes in self._homes_of_ticks]

    @cached_property
    def of_ticks_ping_pong(self) -> list[Work]:
        held = zip(self._homes_of_ticks, self.tokens_of_ticks, strict=True)
        return [self.work_ping_pong(homes, tokens) for homes, tokens in held]
