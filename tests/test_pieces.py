"""The exchange of pieces, which checks their counts and does not pad to the largest count."""

import pytest
import torch
from ranks import Outcome

import distca
from distca import ops
from distca.planning import exchange as gathering
from distca.planning.exchange import HEADER_WORDS, NUM_WORDS, exchange, header_of
from distca.planning.plan import CAUSAL
from distca.ranks.session import opened

WORDS = 5
MOST = gathering.MAX_PIECES


def pieces_of(rank: int, count: int) -> torch.Tensor:
    return torch.arange(count * WORDS).reshape(count, WORDS) + 10**6 * rank


class Gather:
    """A gather of one rank. Its peers send `pieces` in parts of at most `size`."""

    def __init__(self, pieces: list[torch.Tensor], size: int) -> None:
        self.pieces, self.size = pieces, size
        self.num_parts = 0

    def __call__(self, own: torch.Tensor) -> list[torch.Tensor]:
        first = self.num_parts * self.size
        self.num_parts += 1
        parts = [pieces[first : first + self.size] for pieces in self.pieces]
        assert any(torch.equal(part, own) for part in parts)
        return [part.flatten() for part in parts]


@pytest.mark.parametrize(
    "counts", [[0], [7], [0, 0, 0], [3, 0, 5, 1], [0, 200, 0, 0, 0, 1], [20] * 6, [100, 1, 1, 1]]
)
def test_every_rank_gathers_all_pieces(monkeypatch, counts):
    monkeypatch.setattr(gathering, "LEAST_PIECES", 8)
    pieces = [pieces_of(rank, count) for rank, count in enumerate(counts)]
    size = gathering.pieces_at_a_time(counts)
    assert size * len(counts) <= max(8, 4 * sum(counts), len(counts))
    num_parts = set()
    for own in pieces:
        gather = Gather(pieces, size)
        assert torch.equal(gathering.gather_pieces(own, counts, gather), torch.cat(pieces))
        num_parts.add(gather.num_parts)
    assert len(num_parts) == 1


def test_memory_is_proportional_to_all_pieces():
    counts = [10**6, *[1] * 511]
    assert gathering.pieces_at_a_time(counts) * len(counts) <= 4 * sum(counts)
    usual = [60, 90, 70, 110] * 128
    assert gathering.pieces_at_a_time(usual) == max(usual), "in one exchange"


@pytest.mark.parametrize(
    "counts, message",
    [
        ([4, -1, 5], "rank 1 announces -1 pieces of documents; expected 0 to 2147483647. "),
        ([4, 5, 2**40], f"rank 2 announces {2**40} pieces"),
        ([1, MOST, 1], f"all ranks announce {MOST + 2} pieces of documents, rank 1 alone {MOST}"),
    ],
)
def test_impossible_counts_are_named(counts, message):
    with pytest.raises(ValueError, match=message):
        gathering.check_counts(counts)


def announce(rank: int, world_size: int, count: int) -> None:
    """Exchange pieces while rank 1 announces `count` of them."""
    session = opened()
    real_gather = ops.gather

    def damaged(words: torch.Tensor, *others) -> list[torch.Tensor]:
        words[NUM_WORDS] = count
        return real_gather(words, *others)

    header = header_of(10**6, session.options, CAUSAL)
    words = [*header, *[0] * (NUM_WORDS - HEADER_WORDS)]
    try:
        if rank == 1:
            ops.gather = damaged
        exchange(session, distca.Documents([0, 4]).pieces(rank), words)
    finally:
        ops.gather = real_gather


def imbalance_of(rank: int, world_size: int, counts: list[int]) -> float:
    documents = distca.Documents(range(counts[rank] + 1))
    return distca.plan(documents).report().imbalance_after


def messages(outcomes: list[Outcome]) -> list[str]:
    assert [outcome.error_type for outcome in outcomes] == ["ValueError"] * len(outcomes)
    return [outcome.error for outcome in outcomes]


@pytest.mark.parametrize("count", [-3, 2**50])
def test_a_broken_count_is_refused_on_every_rank(ranks, count):
    for message in messages(ranks(3).outcomes(announce, count, timeout_s=30)):
        assert f"rank 1 announces {count} pieces of documents; expected 0 to {MOST}" in message
    assert len(set(ranks(3).run(imbalance_of, [3, 3, 3]))) == 1, "the group works on"


def in_parts(rank: int, world_size: int, counts: list[int]) -> tuple[int, float]:
    """Exchange few pieces at a time. Return (pieces of a rank at a time, imbalance)."""
    defaults = gathering.LEAST_PIECES, gathering.MEAN_COUNTS
    gathering.LEAST_PIECES, gathering.MEAN_COUNTS = 1, 1
    try:
        return gathering.pieces_at_a_time(counts), imbalance_of(rank, world_size, counts)
    finally:
        gathering.LEAST_PIECES, gathering.MEAN_COUNTS = defaults


def test_one_rank_has_most_pieces(ranks):
    counts = [3, 500, 0]
    sizes, imbalances = zip(*ranks(3).run(in_parts, counts), strict=True)
    assert set(sizes) == {503 // 3}, "several exchanges"
    assert set(imbalances) == set(ranks(3).run(imbalance_of, counts))


def num_exchanges(rank: int, world_size: int, counts: list[int]) -> int:
    """Return how many exchanges a plan of this many documents takes before ranks agree on it."""
    real_gather, calls = ops.gather, []
    ops.gather = lambda *arguments: calls.append(1) or real_gather(*arguments)
    try:
        imbalance_of(rank, world_size, counts)
    finally:
        ops.gather = real_gather
    return len(calls)


def test_few_pieces_travel_with_the_headers(ranks):
    assert ranks(3).run(num_exchanges, [3, 500, 0]) == [1] * 3


def test_packs_are_alike_if_their_arguments_are():
    """Containers and types of numbers do not matter, but every value does."""

    def words(lengths=(5, 7), world_size=2, **others) -> tuple[int, ...]:
        return distca.Documents.sharded(lengths, 0, world_size, **others).pack_words

    assert words() == words([5, 7]) == words(torch.tensor([5, 7], dtype=torch.int32))
    assert words(parents=[-1, 0]) == words(parents=(-1, 0)) == words(parents=torch.tensor([-1, 0]))
    assert words(spans=[(1, 3)]) == words(spans=torch.tensor([[1, 3]]))
    packs = [
        *(words(), words([5, 8]), words([5, 7, 0]), words(world_size=3), words(runs=2)),
        *(words(parents=[-1, 0]), words(parents=[-1, -1])),
        *(words(spans=[]), words(spans=[(1, 3)]), words(spans=[(1, 4)]), words(pack=1)),
    ]
    assert len(set(packs)) == len(packs)
