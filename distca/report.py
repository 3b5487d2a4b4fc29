"""Show what was balanced in a run: a table, a summary of numbers, a picture and a trace.

    python -m distca.report RUN

reads the records in the folder RUN (Watching.run_dir) and writes its files there.
"""

import argparse
from collections.abc import Sequence

from distca._output import show
from distca.watching.report import draw_run


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m distca.report",
        description="Shows what was balanced in a run: a table, RUN/summary.json, RUN/balance.png, "
        "RUN/trace.json; for pipelines that share attention also RUN/ticks.png, RUN/ticks.json.",
    )
    parser.add_argument("run", metavar="RUN", help="the folder given as run_dir")
    try:
        table = draw_run(parser.parse_args(arguments).run)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    show(table)


if __name__ == "__main__":
    main()
