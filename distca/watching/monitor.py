"""What users see while they train: a line every N steps, JSON lines, scalars, a closing summary."""

import atexit
import json
import logging
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from distca.watching.figures import MEASURED, STEPS_FILE, ExposedShare
from distca.watching.report import draw_run
from distca.watching.settings import Watching
from distca.watching.trace import forget_times

PREDICTED_SECONDS = ("seconds_before", "seconds_after")
PREDICTED_BYTES = ("bytes_out", "bytes_in", "kept_bytes")
PREDICTED_MB = ("moved_mb", "kept_mb")
MAX_EARLY = 16  # records that wait for the shape of attention
HIDDEN_MS = 0.1  # a plan that was waited for less than this is called hidden

logger = logging.getLogger("distca")


class Monitor:
    """The records of one group, kept by one rank. Records arrive on the planner thread."""

    def __init__(self, watching: Watching) -> None:
        self._log_every = watching.log_every
        self._folder = None if watching.run_dir is None else Path(watching.run_dir)
        self._recent: list[Mapping] = []
        self._exposed = ExposedShare()
        self._has_advised = False
        self._recorded_at: float | None = None
        self._is_empty, self._is_closed = True, False
        self._early: list[tuple[int, Mapping, tuple[float, float]]] = []
        self._lock = threading.RLock()
        self._file = self._writer = None
        if self._folder is not None:
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                forget_times(self._folder)
                self._file = (self._folder / STEPS_FILE).open("w", buffering=1)
            except OSError as error:
                raise ValueError(
                    f"run_dir is {str(self._folder)!r}; expected a folder to write records to: "
                    f"{error}"
                ) from error
        if watching.tensorboard:
            self._writer = _tensorboard_writer(self._folder / "tensorboard")
        _show_lines()
        atexit.register(self.close)

    def record(
        self,
        step: int,
        record: Mapping,
        work: tuple[float, float] = (1.0, 1.0),
        is_assumed: bool = False,
    ) -> None:
        """One plan's figures, and lists by rank. Predictions are in proportion to `work`, the FLOPs
        and the bytes of the plan's shape. If that is assumed, they wait for the next known one."""
        with self._lock:
            now, before = time.perf_counter(), self._recorded_at
            self._recorded_at = now
            if before is not None:
                record = {**record, "step_ms": 1e3 * (now - before)}
            if is_assumed and len(self._early) < MAX_EARLY:
                self._early.append((step, record, work))
                return
            self._take_early(None if is_assumed else work)
            self._take(step, record)

    def _take_early(self, work: tuple[float, float] | None) -> None:
        for step, record, assumed in self._early:
            ratios = (new / old for new, old in zip(work or assumed, assumed, strict=True))
            self._take(step, scaled(record, *ratios))
        self._early = []

    def _take(self, step: int, record: Mapping) -> None:
        """A full disk ends the records, not the training."""
        with self._lock:
            self._advise(record)
            try:
                self._write(step, record)
            except OSError as error:
                logger.warning("records end at step %d: %s", step, error)
                self._file = self._writer = None
            self._recent.append(record)
            self._is_empty = False
            if self._log_every and (step + 1) % self._log_every == 0:
                logger.info(line(step, self._recent))
                self._recent = []
            elif len(self._recent) > max(1, self._log_every):
                self._recent.pop(0)

    def _advise(self, record: Mapping) -> None:
        self._exposed.add(record)
        advice = None if self._has_advised else self._exposed.advice
        if advice is not None:
            self._has_advised = True
            logger.info("distca: %s", advice)

    def _write(self, step: int, record: Mapping) -> None:
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **record}) + "\n")
        if self._writer is not None:
            for name, value in scalars(record).items():
                self._writer.add_scalar(f"distca/{name}", value, step)

    def close(self) -> None:
        """Ends the records and draws the summary; a second call does nothing."""
        atexit.unregister(self.close)
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._take_early(None)
        if self._is_empty:
            logger.warning(
                "distca: no step was planned, so there is nothing to show; unless Options.enabled "
                "is False, call distca.plan(documents) once a step on every rank"
            )
        with self._lock:
            file, writer = self._file, self._writer
            self._file = self._writer = None
        if writer is not None:
            writer.close()
        if file is not None:
            file.close()
            if (self._folder / STEPS_FILE).stat().st_size:
                logger.info("%s", draw_run(self._folder))


def _tensorboard_writer(folder: Path):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            "Watching.tensorboard needs tensorboard; install it: pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))


def scaled(record: Mapping, seconds: float, moved: float) -> dict:
    """Return a record with its predicted seconds and bytes multiplied by these factors. The bytes
    are approximate: rows of queries and of keys count alike."""
    return {
        **record,
        **{name: moved * record[name] for name in PREDICTED_MB},
        **{name: [seconds * each for each in record[name]] for name in PREDICTED_SECONDS},
        **{name: [round(moved * each) for each in record[name]] for name in PREDICTED_BYTES},
    }


def scalars(record: Mapping) -> dict[str, float]:
    """Return the record's numbers. Of the lists by rank, only measured times are included."""
    values = {name: value for name, value in record.items() if type(value) in (int, float)}
    for name in MEASURED:
        if measured := record.get(name):
            values[f"{name}_mean"] = statistics.fmean(measured)
            values[f"{name}_max"] = max(measured)
    return values


def line(step: int, records: Sequence[Mapping]) -> str:
    """Return the mean of these records as one line."""
    names = [name for name, value in records[0].items() if type(value) in (int, float)]
    mean = {name: statistics.fmean(each[name] for each in records) for name in names}
    times = ""
    if timed := [each for each in records if each["attention_ms"]]:
        attention, exposed = (
            f"{min(timed[-1][name]):.1f}-{max(timed[-1][name]):.1f} ms" for name in MEASURED
        )
        times = f"attention {attention}, exposed {exposed}  "
    keeping = records[-1].get("keeping")
    kept = f", {mean['kept_mb']:.1f} MB kept ({keeping})" if keeping else ""
    wait = mean["waited_ms"]
    hidden = "hidden" if wait < HIDDEN_MS else f"waited {wait:.1f} ms"
    return (
        f"distca  step {step + 1}  imbalance {mean['imbalance_before']:.3f} -> "
        f"{mean['imbalance_after']:.3f}  {times}{mean['moved_mb']:.1f} MB a layer{kept}  "
        f"plan {mean['plan_ms']:.1f} ms, {hidden}"
    )


def _show_lines() -> None:
    """Lines go where the program's own logs go; to stdout where it has none."""
    logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("%(message)s"))
        logger.addHandler(handler)
