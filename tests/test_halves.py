"""A plan cut into halves: every query stays on its server."""

import random

import pytest
import torch
from torch import Tensor

import distca
from distca.planning.cluster import Cluster
from distca.planning.cost import cost_tensor
from distca.planning.plan import balance, tasks_of
from distca.planning.step import half_of

SHAPE = distca.AttentionShape(4, 2, 8, 2)


def documents_of(lengths: list[int]) -> distca.Documents:
    return distca.Documents([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()])


def servers_by_token(pieces: Tensor, tasks: Tensor) -> dict[tuple[int, int], tuple[int, int]]:
    """Map (document, queries up to its end) to (server, whether it keeps inputs).

    Queries count from the end, because both halves agree on the end of a document.
    """
    held = pieces[pieces[:, 3] > 0]
    servers = {}
    for index, begin, end, server, is_kept in tasks.tolist():
        _, document, _, length, context = held[index].tolist()
        assert context <= begin < end <= length
        for query in range(begin, end):
            key = document, length - query
            assert key not in servers, "computed twice"
            servers[key] = server, is_kept
    return servers


@pytest.mark.parametrize("window", [(-1, 0), (5, 0), (0, 0)])
@pytest.mark.parametrize("seed", range(8))
def test_queries_stay_on_their_servers(seed, window):
    generator = random.Random(seed)
    num_ranks = generator.randint(2, 5)
    lengths = [
        [generator.choice([0, 1, 7, 300]) for _ in range(generator.randint(0, 4))]
        for _ in range(num_ranks)
    ]
    documents = [documents_of(each) for each in lengths]
    rows = [generator.randint(0, each.num_tokens) for each in documents]
    pieces = torch.cat([each.pieces(rank) for rank, each in enumerate(documents)])
    cost, cluster = (
        cost_tensor(distca.Options(), SHAPE, "cpu"),
        Cluster(num_ranks, kept_cap_bytes=3000),
    )
    encoded, _ = balance(pieces, window, cost, SHAPE, cluster, 0.01)
    tasks = tasks_of(encoded)
    whole = servers_by_token(pieces, tasks)
    seen = {}
    for idx in range(2):
        held, plan = half_of(pieces, tasks, torch.tensor(rows), window, idx)
        halves = [each.halves(row, window)[idx] for each, row in zip(documents, rows, strict=True)]
        for rank, half in enumerate(halves):
            own = held[held[:, 0] == rank]
            expected = half.pieces(rank)
            nonempty = own[own[:, 3] > 0][:, 2:]
            assert torch.equal(nonempty, expected[expected[:, 3] > 0][:, 2:])
        cut = {}  # queries of first halves count from their document's end
        if idx == 0:
            for piece, own in zip(pieces.tolist(), held.tolist(), strict=True):
                cut[piece[1]] = piece[3] - own[3]
        for (document, left), server in servers_by_token(held, tasks_of(plan)).items():
            seen[document, left + cut.get(document, 0)] = server
    assert seen == whole


def tokens_of(pieces: Tensor) -> dict[int, list[tuple[int, int, bool]]]:
    """Return (document, position, whether it is context) of each rank's rows."""
    rows = {}
    for rank, document, start, length, context in pieces.tolist():
        rows.setdefault(rank, []).extend(
            (document, start + at, at < context) for at in range(length)
        )
    return rows


def servers_by_query(pieces: Tensor, tasks: Tensor) -> dict[tuple[int, int], int]:
    """Map (document, position) of queries to servers."""
    first = pieces[(pieces[:, 2] == 0) & (pieces[:, 3] > 0)]
    return {
        (int(first[index, 1]), query): server
        for index, begin, end, server, _ in tasks.tolist()
        for query in range(begin, end)
    }


@pytest.mark.parametrize("window", [(-1, 0), (70, 0), (5, 0), (0, 0)])
@pytest.mark.parametrize("seed", range(6))
def test_halves_of_documents_that_cross_ranks(seed, window):
    generator = random.Random(seed)
    num_ranks = generator.randint(2, 5)
    lengths = [generator.choice([0, 1, 7, 90, 300]) for _ in range(generator.randint(1, 6))]
    documents = [distca.Documents.sharded(lengths, r, num_ranks, runs=2) for r in range(num_ranks)]
    pieces = torch.cat([each.pieces(rank) for rank, each in enumerate(documents)])
    cost, cluster = (
        cost_tensor(distca.Options(), SHAPE, "cpu"),
        Cluster(num_ranks, kept_cap_bytes=generator.choice([0, 3000, 1e9])),
    )
    encoded, _ = balance(pieces, window, cost, SHAPE, cluster, 0.01)
    rows = torch.tensor([each.run_border for each in documents])
    whole, seen = servers_by_query(pieces, tasks_of(encoded)), {}
    tokens = tokens_of(pieces)
    for idx in range(2):
        held, plan = half_of(pieces, tasks_of(encoded), rows, window, idx)
        halves = [each.halves(each.run_border, window)[idx] for each in documents]
        own = torch.cat([half.pieces(rank) for rank, half in enumerate(halves)])
        assert torch.equal(held[held[:, 3] > 0], own)
        shift = check_rows_of_half(tokens, tokens_of(own), rows.tolist(), window[0], idx)
        for (document, query), server in servers_by_query(held, tasks_of(plan)).items():
            seen[document, query + shift.get(document, 0)] = server
    assert seen == whole


def check_rows_of_half(tokens, held, rows, left: int, idx: int) -> dict[int, int]:
    """Check each rank's rows in a half: context is what its queries see of the other half, wherever
    it is. Return the first position that the half holds, by document."""
    queries = {rank: of[rows[rank] :] if idx else of[: rows[rank]] for rank, of in tokens.items()}
    earlier = {rank: of[: rows[rank]] if idx else [] for rank, of in tokens.items()}
    begins = {}
    for document, position, _ in sum(queries.values(), []):
        begins[document] = min(position, begins.get(document, position))
    visible = {  # context is seen by the first query of the half at least
        document: 0 if left < 0 else max(0, begin - left) for document, begin in begins.items()
    }
    for rank, of_rank in queries.items():
        context = [
            (document, position)
            for document, position, _ in earlier[rank]
            if visible.get(document, position + 1) <= position
        ]
        expected = [(*token, True) for token in context] + of_rank
        shifted = [(d, p - visible[d], is_context) for d, p, is_context in expected]
        assert held.get(rank, []) == shifted
    return visible
