"""The rows that the tasks of a plan read, by rank."""

from dataclasses import dataclass

import numpy as np

from distca.planning.packs import Pack


@dataclass(frozen=True)
class TaskRows:
    """Rows of one rank that one task reads. Each field is an array [num_pairs]."""

    task: np.ndarray
    rank: np.ndarray
    queries: np.ndarray
    keys: np.ndarray
    """Number of keys that at least one of the task's queries sees."""
    new_keys: np.ndarray
    """Number of these keys that no earlier task of the server reads. Keys travel only once."""


def rows_of_tasks(pack: Pack, tasks: np.ndarray, window: tuple[int, int]) -> TaskRows:
    """Return the rows that tasks [num_tasks, 4] (document, q_begin, q_end, server) read, for each
    piece of their documents. Tasks are in a plan's order: by (server, document, q_begin)."""
    document, q_begin, q_end, _ = tasks.T
    k_begin, k_end = keys_of(window, q_begin, q_end, pack.lengths[document])
    new_begin = k_begin.copy()
    # A server's tasks of one document are consecutive, and so are their keys.
    same = (tasks[1:, [0, 3]] == tasks[:-1, [0, 3]]).all(1)  # document and server as before
    new_begin[1:][same] = np.maximum(new_begin[1:], k_end[:-1])[same]
    task, piece = _pairs_of_document(document, pack)
    rank, _, start, length = pack.pieces[piece].T

    def held(begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return np.maximum(np.minimum(end[task], start + length) - np.maximum(begin[task], start), 0)

    return TaskRows(task, rank, held(q_begin, q_end), held(k_begin, k_end), held(new_begin, k_end))


def keys_of(
    window: tuple[int, int], q_begin: np.ndarray, q_end: np.ndarray, length: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return keys [begin, end) that at least one of queries [q_begin, q_end) sees."""
    left, right = window
    begin = np.zeros_like(q_begin) if left < 0 else np.maximum(q_begin - left, 0)
    return begin, length if right < 0 else np.minimum(q_end + right, length)


def _pairs_of_document(document: np.ndarray, pack: Pack) -> tuple[np.ndarray, np.ndarray]:
    """Return index arrays (task, piece) of all pairs that belong to one document."""
    by_document = np.argsort(pack.pieces[:, 1], kind="stable")
    counts = np.bincount(pack.pieces[:, 1], minlength=pack.num_documents)
    first = counts.cumsum() - counts
    repeats = counts[document]
    task = np.repeat(np.arange(document.size), repeats)
    within = np.arange(task.size) - np.repeat(repeats.cumsum() - repeats, repeats)
    return task, by_document[first[document][task] + within]
