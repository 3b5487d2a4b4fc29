"""An account as tables on the screen, and as data."""

from collections.abc import Iterable

import numpy as np

from distca.explain.account import Account

MIB = 2**20
MAX_LINES = 20  # of a table, unless all are wanted
MAX_LINKS = 8

Column = tuple[str, int, Iterable]  # heading, width, cells
LEGEND = (
    "from: home of the task's queries (*: of most of them); to: its server; x least: bytes over\n"
    "those of the cheapest shape with this much work; +-ms: of that rank above the mean,\n"
    "before>after"
)


def report(account: Account, rank: int | None, all_lines: bool) -> str:
    """Totals, ranks, tasks and links: of one rank, or of all; the largest only, or all lines."""
    tables = [table(account, rank, all_lines) for table in (ranks_table, tasks_table, links_table)]
    tables[1] += "\n" + LEGEND
    return "\n\n".join([totals(account), *tables])


def totals(account: Account) -> str:
    step, moved = account.step, account.is_moved
    lengths, seconds = step.pack.lengths, account.tasks.seconds
    before, after = account.seconds_before.max(), account.seconds_after.max()
    lines = [
        f"{step.pack.num_ranks} ranks, {lengths.sum()} tokens, {lengths.size} documents (median "
        f"{np.median(lengths):.0f}, longest {lengths.max()}), window {step.window}",
        f"attention of a layer, forward + backward: mean {_ms(account.mean_seconds)} ms; slowest "
        f"rank x {before / account.mean_seconds:.3f} before, x {after / account.mean_seconds:.3f} "
        "after",
    ]
    if not moved.any():
        why = (
            f"tolerance is {step.tolerance:.1%}" if step.tolerance < 1 else "balancing is disabled"
        )
        return "\n".join([*lines, f"nothing moves: {why}"])
    num_bytes, least = account.bytes_in.sum(), account.least_bytes
    over = f" (x {num_bytes / least:.2f})" if least > 0 else ""
    lines += [
        f"moved: {moved.sum()} of {moved.size} tasks, {seconds[moved].sum() / seconds.sum():.1%} "
        "of the attention",
        f"bytes: {_mib(num_bytes)} MiB, lower bound {_mib(least)} MiB{over}",
    ]
    for name, by_rank in (("sender", account.bytes_out), ("receiver", account.bytes_in)):
        busiest = int(by_rank.argmax())
        lines.append(f"busiest {name}: rank {busiest}, {_mib(by_rank[busiest])} MiB")
    return "\n".join(lines)


def ranks_table(account: Account, rank: int | None, all_lines: bool) -> str:
    """Attention time and bytes of ranks, those first whose time changes most."""
    change = np.abs(account.seconds_after - account.seconds_before)
    order = np.argsort(-change, kind="stable")
    chosen = np.array([rank]) if rank is not None else _most(order, all_lines)
    served = np.bincount(account.tasks.server[account.is_moved], minlength=change.size)
    before, after = (account.excess(s) for s in (account.seconds_before, account.seconds_after))
    columns = [
        ("rank", 6, chosen),
        ("before ms", 10, map(_ms, account.seconds_before[chosen])),
        ("after ms", 10, map(_ms, account.seconds_after[chosen])),
        ("above mean before", 18, map(_signed_ms, before[chosen])),
        ("after", 9, map(_signed_ms, after[chosen])),
        ("sends MiB", 10, map(_mib, account.bytes_out[chosen])),
        ("receives MiB", 13, map(_mib, account.bytes_in[chosen])),
        ("visiting tasks", 15, served[chosen]),
    ]
    return _table("Ranks", columns, len(chosen), order.size if rank is None else 1)


def tasks_table(account: Account, rank: int | None, all_lines: bool) -> str:
    """What is computed away from home, most seconds first; of one rank, or with `all_lines`, what
    stays at home too."""
    tasks, moved = account.tasks, account.is_moved
    wanted = moved | (all_lines or rank is not None)
    if rank is not None:
        gives = np.zeros(moved.size, dtype=bool)
        gives[account.transfers.task[account.transfers.home == rank]] = True
        wanted &= gives | (tasks.server == rank)
    order = np.lexsort((-tasks.seconds, ~moved))
    order = order[wanted[order]]
    chosen = _most(order, all_lines)
    return _table("Tasks", _task_columns(account, chosen), chosen.size, order.size)


def _task_columns(account: Account, chosen: np.ndarray) -> list[Column]:
    tasks, moved = account.tasks, account.is_moved[chosen]
    home, server = tasks.home[chosen], tasks.server[chosen]
    stars = np.where(tasks.num_homes[chosen] > 1, "*", "")
    before, after = (account.excess(s) for s in (account.seconds_before, account.seconds_after))

    def if_moved(texts: Iterable[str]) -> list[str]:
        return [text if m else "" for text, m in zip(texts, moved, strict=True)]

    def excess_of(ranks: np.ndarray) -> list[str]:
        return if_moved(f"{_signed_ms(before[r])}>{_signed_ms(after[r])}" for r in ranks)

    return [
        ("from", 6, [f"{rank}{star}" for rank, star in zip(home, stars, strict=True)]),
        ("to", 6, server),
        ("document", 9, tasks.document[chosen]),
        ("rows", 14, _ranges(tasks.q_begin[chosen], tasks.q_end[chosen])),
        ("keys", 14, _ranges(tasks.k_begin[chosen], tasks.k_end[chosen])),
        ("ms", 7, map(_ms, tasks.seconds[chosen])),
        ("MiB", 7, map(_mib, tasks.num_bytes[chosen])),
        ("x least", 8, if_moved(f"{over:.2f}" for over in account.bytes_over_least[chosen])),
        ("from +-ms", 14, excess_of(home)),
        ("to +-ms", 14, excess_of(server)),
    ]


def links_table(account: Account, rank: int | None, all_lines: bool) -> str:
    home, server, num_bytes = account.links()
    if rank is not None:
        of_rank = (home == rank) | (server == rank)
        home, server, num_bytes = home[of_rank], server[of_rank], num_bytes[of_rank]
    chosen = slice(None if all_lines else MAX_LINKS)
    bandwidths = account.bandwidth(home, server)
    columns = [
        ("home", 6, home[chosen]),
        ("server", 7, server[chosen]),
        ("MiB", 9, map(_mib, num_bytes[chosen])),
        ("ms", 9, map(_ms, (num_bytes / bandwidths)[chosen])),
    ]
    return _table("Links, most bytes first", columns, len(home[chosen]), home.size)


def as_data(account: Account) -> dict:
    """The whole account: what `--json` writes."""
    step, tasks, transfers = account.step, account.tasks, account.transfers
    by_home: list[dict[int, int]] = [{} for _ in account.is_moved]
    for each in _records(task=transfers.task, home=transfers.home, bytes=transfers.num_bytes):
        by_home[each["task"]][each["home"]] = each["bytes"]
    home, server, num_bytes = account.links()
    return {
        "ranks": step.pack.num_ranks,
        "tokens": int(step.pack.lengths.sum()),
        "documents": step.pack.lengths.tolist(),
        "window": list(step.window),
        "mean_seconds": account.mean_seconds,
        "max_over_mean_before": float(account.seconds_before.max() / account.mean_seconds),
        "max_over_mean_after": float(account.seconds_after.max() / account.mean_seconds),
        "bytes": int(account.bytes_in.sum()),
        "least_bytes": account.least_bytes,
        "seconds_before": account.seconds_before.tolist(),
        "seconds_after": account.seconds_after.tolist(),
        "bytes_out": account.bytes_out.tolist(),
        "bytes_in": account.bytes_in.tolist(),
        "links": _records(home=home, server=server, bytes=num_bytes),
        "tasks": _records(
            server=tasks.server,
            document=tasks.document,
            rows=np.stack([tasks.q_begin, tasks.q_end], axis=1),
            keys=np.stack([tasks.k_begin, tasks.k_end], axis=1),
            home=tasks.home,
            seconds=tasks.seconds,
            bytes=tasks.num_bytes,
            bytes_by_home=np.array(by_home),
            bytes_over_least=account.bytes_over_least,
        ),
    }


def _records(**columns: np.ndarray) -> list[dict]:
    """An object for each row."""
    rows = zip(*(column.tolist() for column in columns.values()), strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _most(order: np.ndarray, all_lines: bool) -> np.ndarray:
    return order if all_lines else order[:MAX_LINES]


def _table(title: str, columns: list[Column], num_lines: int, num_all: int) -> str:
    """Right-aligned; the title says what is left out."""
    if num_all == 0:
        return f"{title}: none"
    left_out = f" ({num_lines} of {num_all}; --all shows all)" if num_lines < num_all else ""
    heads, widths, cells = zip(*columns, strict=True)
    lines = [f"{title}{left_out}"]
    for row in (heads, *zip(*cells, strict=True)):
        line = "".join(f"{cell!s:>{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append(line.rstrip())
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.1 else f"{1e3 * seconds:.1f}"


def _signed_ms(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f}" if abs(seconds) < 0.1 else f"{1e3 * seconds:+.0f}"


def _mib(num_bytes: float) -> str:
    mib = num_bytes / MIB
    return f"{mib:.1f}" if mib < 1000 else f"{mib:.0f}"


def _ranges(begin: np.ndarray, end: np.ndarray) -> list[str]:
    return [f"{first}-{last}" for first, last in zip(begin, end, strict=True)]
