"""The documents of simulated steps, and packs made of them."""

import bisect
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from distca.planning.packs import MAX_LENGTH, cut_pack
from distca.simulate.scenario import Scenario

DISTRIBUTIONS = "fixed:LENGTH, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"
DRAWN_LENGTHS = 100_000


@dataclass(frozen=True)
class Documents:
    """Documents of one step, in the order of the packs."""

    lengths: np.ndarray  # [num_documents]
    pack: np.ndarray  # [num_documents], never decreasing; micro-batches one after another


def distribution(text: str, seed: int) -> list[int]:
    """Lengths drawn from a distribution; raises ValueError with what may be given."""
    name, *parameters = text.split(":")
    rng = np.random.default_rng(seed)
    try:
        match name, [float(value) for value in parameters]:
            case "fixed", [length]:
                drawn = np.array([length])
            case "uniform", [low, high]:
                drawn = rng.uniform(low, high + 1, DRAWN_LENGTHS)
            case "lognormal", [median, sigma]:
                drawn = rng.lognormal(math.log(median), sigma, DRAWN_LENGTHS)
            case _:
                raise ValueError(f"there is no {name!r} of {len(parameters)} numbers")
        is_valid = np.isfinite(drawn).all() and drawn.min() >= 0 and 1 <= drawn.max() <= MAX_LENGTH
        if not is_valid:
            raise ValueError(f"lengths have to be from 0 to {MAX_LENGTH}, and not all 0")
    except ValueError as error:
        raise ValueError(f"distribution {text!r}: {error}; expected {DISTRIBUTIONS}") from error
    return np.maximum(drawn.astype(np.int64), 1).tolist()


def draw(lengths: list[int], scenario: Scenario, num_steps: int, seed: int) -> list[Documents]:
    """Documents in shuffled order, cut to the context, then into packs of equally many tokens; the
    rest of one starts the next pack, as a document of its own. benchmarks/training_step.py draws
    the same packs in the same order."""
    stream = [length for length in lengths if length > 0]
    random.Random(seed).shuffle(stream)
    longest = scenario.context
    if longest < scenario.pack_tokens:
        stream = [min(longest, rest) for length in stream for rest in range(length, 0, -longest)]
    packs_of_step = scenario.packs * scenario.micro_batches
    total = num_steps * packs_of_step * scenario.pack_tokens
    repeated = np.tile(stream, -(-total // sum(stream)))
    pack, _, _, tokens = cut_pack(repeated, num_steps * packs_of_step, total).pieces.T
    edges = np.searchsorted(pack, np.arange(1, num_steps) * packs_of_step)
    of_steps = zip(np.split(tokens, edges), np.split(pack % packs_of_step, edges), strict=True)
    return [Documents(*each) for each in of_steps]


def balanced_packs(
    lengths: np.ndarray, work: np.ndarray, num_packs: int, most_tokens: float
) -> np.ndarray:
    """Pack of each document [num_documents] when, longest first, each goes to the pack with the
    least work among those that stay within `most_tokens`; to the one with fewest tokens if none
    does."""
    packs = np.empty(lengths.size, dtype=np.int64)
    by_work = [(0.0, 0, pack) for pack in range(num_packs)]  # (work, tokens, pack)
    full: list[tuple[int, float, int]] = []  # (tokens, work, pack), set aside for shorter documents
    order = np.argsort(-lengths, kind="stable")
    for document, length, cost in zip(
        order.tolist(), lengths[order].tolist(), work[order].tolist(), strict=True
    ):
        while full and full[0][0] + length <= most_tokens:
            tokens, done, pack = heapq.heappop(full)
            heapq.heappush(by_work, (done, tokens, pack))
        while by_work and by_work[0][1] + length > most_tokens:
            done, tokens, pack = heapq.heappop(by_work)
            heapq.heappush(full, (tokens, done, pack))
        if by_work:
            done, tokens, pack = by_work[0]
            heapq.heapreplace(by_work, (done + cost, tokens + length, pack))
        else:
            tokens, done, pack = full[0]
            heapq.heapreplace(full, (tokens + length, done + cost, pack))
        packs[document] = pack
    return packs


def karmarkar_karp(weights: Sequence[float], num_bins: int) -> np.ndarray:
    """Return the bin of each item, int64 [num_items], so that bins have like sums of weights: the
    largest differencing method. The heaviest bin comes first."""
    # Partitions of some items: (-difference of heaviest and lightest bin, tie, bins). Bins are
    # (sum, items), lightest first, and empty ones are left out.
    heap = [(-weight, item, [(weight, [item])]) for item, weight in enumerate(weights)]
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, tie, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        bins = _joined(*sorted((one, other), key=len), num_bins)
        lightest = bins[0][0] if len(bins) == num_bins else 0
        heapq.heappush(heap, (lightest - bins[-1][0], tie, bins))
    bin_of = np.zeros(len(weights), dtype=np.int64)
    for number, (_, items) in enumerate(reversed(heap[0][2] if heap else ())):
        bin_of[items] = number
    return bin_of


Bins = list[tuple[float, list[int]]]


def _joined(few: Bins, many: Bins, num_bins: int) -> Bins:
    """Add the bins of `few` to `many`, heaviest to lightest, which may be empty."""
    num_empty = min(num_bins - len(many), len(few))
    num_met = len(few) - num_empty
    met, many[:num_met] = many[:num_met], []
    new = few[num_met:]
    for (weight, items), (more, others) in zip(met, reversed(few[:num_met]), strict=True):
        items.extend(others)
        new.append((weight + more, items))
    for each in new:  # faster than a sort where `few` are a few
        bisect.insort(many, each, key=lambda bin_: bin_[0])
    return many


def sorted_micro_batches(
    lengths: Sequence[int], weights: Sequence[float], num_ranks: int, most_tokens: int
) -> list[list[list[int]]]:
    """Return the documents of each micro-batch and rank, by index: what loaders of reinforcement
    learning do. Every rank has equally many micro-batches, as few as hold at most `most_tokens`
    each when bins of the Karmarkar-Karp method hold them. Bins of like weight meet in one.

    Raises ValueError for a document that is longer than `most_tokens`.
    """
    longest = max(lengths, default=0)
    if longest > most_tokens:
        raise ValueError(
            f"most_tokens is {most_tokens}; expected at least {longest}, the longest document"
        )
    lengths = np.asarray(lengths, dtype=np.int64)
    num_bins = num_ranks * max(1, -(-int(lengths.sum()) // (num_ranks * most_tokens)))
    while True:  # bins for one document each are enough
        bin_of = karmarkar_karp(weights, num_bins)
        if np.bincount(bin_of, lengths, num_bins).max() <= most_tokens:
            break
        num_bins += num_ranks
    bins = [np.flatnonzero(bin_of == number).tolist() for number in range(num_bins)]
    return [bins[first : first + num_ranks] for first in range(0, num_bins, num_ranks)]
