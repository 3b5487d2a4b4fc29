"""Launcher: `torchrun ... -m distca.run [flags] script.py [arguments]` runs the script with distca
configured by flags; the script sees its own arguments only."""

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from distca import options, scope
from distca.integrations import plain
from distca.ranks import session


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m distca.run",
        description="Runs a training script with balanced attention. Flags before the script are "
        "distca's, everything after it is the script's own.",
    )
    options.add_flags(made)
    made.add_argument("script", help="path of the Python script to run")
    made.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return made


@record
def main(arguments: Sequence[str] | None = None) -> None:
    parsed = parser().parse_args(arguments)
    script = Path(parsed.script)
    if not script.is_file():
        parser().error(f"script {parsed.script} does not exist")
    try:
        chosen = options.from_flags(parsed)
    except ValueError as error:
        parser().error(str(error))
    session.configure(chosen)
    if chosen.patch_sdpa:
        torch.nn.functional.scaled_dot_product_attention = scope.scaled_dot_product_attention
    if chosen.document_end_id is not None or chosen.document_positions is not None:
        plain.derive_documents(chosen)
    if chosen.transformers:
        importlib.import_module("distca.integrations.transformers")
    sys.argv = [parsed.script, *parsed.arguments]
    sys.path[0] = str(script.resolve().parent)
    runpy.run_path(parsed.script, run_name="__main__")


if __name__ == "__main__":
    main()
