"""An account as tables on the screen, and as data."""

from collections.abc import Callable, Sequence

import numpy as np

from distca.explain.account import Account

MIB = 2**20
MAX_LINES = 20  # of a table, unless all are wanted
MAX_LINKS = 8

Column = tuple[str, int, Callable[[int], object]]  # heading, width, cell by index
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
    before, after = account.seconds_before, account.seconds_after
    over_before, over_after = account.excess(before), account.excess(after)
    served = np.bincount(account.tasks.server[account.is_moved], minlength=before.size)
    columns = [
        ("rank", 6, str),
        ("before ms", 10, lambda r: _ms(before[r])),
        ("after ms", 10, lambda r: _ms(after[r])),
        ("above mean before", 18, lambda r: _signed_ms(over_before[r])),
        ("after", 9, lambda r: _signed_ms(over_after[r])),
        ("sends MiB", 10, lambda r: _mib(account.bytes_out[r])),
        ("receives MiB", 13, lambda r: _mib(account.bytes_in[r])),
        ("visiting tasks", 15, lambda r: served[r]),
    ]
    order = np.argsort(-np.abs(after - before), kind="stable")
    return _table("Ranks", columns, order if rank is None else [rank], all_lines)


def tasks_table(account: Account, rank: int | None, all_lines: bool) -> str:
    """What is computed away from home, most seconds first; of one rank, or with `all_lines`, what
    stays at home too."""
    tasks, moved, over = account.tasks, account.is_moved, account.bytes_over_least
    before, after = (account.excess(s) for s in (account.seconds_before, account.seconds_after))

    def excess_of(task: int, ranks: np.ndarray) -> str:
        own = ranks[task]
        return f"{_signed_ms(before[own])}>{_signed_ms(after[own])}" if moved[task] else ""

    columns = [
        ("from", 6, lambda i: f"{tasks.home[i]}{'*' if tasks.num_homes[i] > 1 else ''}"),
        ("to", 6, lambda i: tasks.server[i]),
        ("document", 9, lambda i: tasks.document[i]),
        ("rows", 14, lambda i: f"{tasks.q_begin[i]}-{tasks.q_end[i]}"),
        ("keys", 14, lambda i: f"{tasks.k_begin[i]}-{tasks.k_end[i]}"),
        ("ms", 7, lambda i: _ms(tasks.seconds[i])),
        ("MiB", 7, lambda i: _mib(tasks.num_bytes[i])),
        ("x least", 8, lambda i: f"{over[i]:.2f}" if moved[i] else ""),
        ("from +-ms", 14, lambda i: excess_of(i, tasks.home)),
        ("to +-ms", 14, lambda i: excess_of(i, tasks.server)),
    ]
    wanted = moved | (all_lines or rank is not None)
    if rank is not None:
        away = account.transfers.task[account.transfers.home == rank]
        wanted &= (tasks.server == rank) | np.isin(np.arange(moved.size), away)
    order = np.lexsort((-tasks.seconds, ~moved))
    return _table("Tasks", columns, order[wanted[order]], all_lines)


def links_table(account: Account, rank: int | None, all_lines: bool) -> str:
    home, server, num_bytes = account.links()
    seconds = num_bytes / account.bandwidth(home, server)
    columns = [
        ("home", 6, lambda i: home[i]),
        ("server", 7, lambda i: server[i]),
        ("MiB", 9, lambda i: _mib(num_bytes[i])),
        ("ms", 9, lambda i: _ms(seconds[i])),
    ]
    order = np.flatnonzero((rank is None) | (home == rank) | (server == rank))
    return _table("Links, most bytes first", columns, order, all_lines, MAX_LINKS)


def _table(
    title: str, columns: list[Column], order: Sequence[int], all_lines: bool, most: int = MAX_LINES
) -> str:
    """Right-aligned; the title says what is left out."""
    if len(order) == 0:
        return f"{title}: none"
    shown = order if all_lines else order[:most]
    if len(shown) < len(order):
        title += f" ({len(shown)} of {len(order)}; --all shows all)"
    rows = [[name for name, _, _ in columns]]
    rows += [[str(cell(i)) for _, _, cell in columns] for i in shown]
    widths = [width for _, width, _ in columns]
    lines = ["".join(map(str.rjust, row, widths)).rstrip() for row in rows]
    return "\n".join([title, *lines])


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


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}" if seconds < 0.1 else f"{1e3 * seconds:.1f}"


def _signed_ms(seconds: float) -> str:
    return f"{1e3 * seconds:+.2f}" if abs(seconds) < 0.1 else f"{1e3 * seconds:+.0f}"


def _mib(num_bytes: float) -> str:
    mib = num_bytes / MIB
    return f"{mib:.1f}" if mib < 1000 else f"{mib:.0f}"
