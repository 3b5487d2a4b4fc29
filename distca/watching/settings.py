"""Configuration of logs and records."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Logs and records of a run. They do not affect results. Pass it on every rank: all ranks take
    part in timing, and rank 0 keeps the records."""

    log_every: int = 0
    """Log a one-line summary on rank 0 every N steps: imbalance before and after, measured
    attention time and exposed communication of the ranks, bytes moved and kept, planning time. 0
    disables it."""

    run_dir: str | None = None
    """Folder for records: steps.jsonl with a line per step, and at the end summary.json,
    balance.png and trace.json. A pipeline that shares attention also gets ticks.png and ticks.json.
    `python -m distca.report RUN_DIR` shows them at any time. None: no records."""

    tensorboard: bool = False
    """Write the figures of run_dir as TensorBoard scalars too, into run_dir/tensorboard."""

    def __post_init__(self) -> None:
        if self.log_every < 0:
            raise ValueError(f"log_every is {self.log_every}; expected 0 or more steps")
        if self.tensorboard and self.run_dir is None:
            raise ValueError("tensorboard is True, run_dir None; expected a folder for the scalars")

    @property
    def is_on(self) -> bool:
        return self.log_every > 0 or self.run_dir is not None
