"""Launcher: `torchrun ... -m distca.run [flags] script.py [arguments]` runs the script with distca
configured by flags; the script sees its own arguments only. `[flags] -m module [arguments]` runs a
module, as Python's own -m does."""

import argparse
import importlib
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from distca import scope
from distca.integrations import plain
from distca.options import Options, add_flags, check, from_flags
from distca.ranks import session
from distca.ranks.hints import hint
from distca.watching.settings import Watching


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of the launcher, for scripts that do not call distca."""

    patch_sdpa: bool = False
    """Replace torch.nn.functional.scaled_dot_product_attention for the whole process."""

    document_end_id: int | None = None
    """Token id that ends each document in the tokens that the script's model is called with. With
    patch_sdpa, documents are read from it without an edit of the script."""

    document_positions: str | None = None
    """Name of the model's argument whose positions restart at 0 with each document. With
    patch_sdpa, documents are read from it without an edit of the script."""

    transformers: bool = False
    """Register attn_implementation="distca" with transformers for the script."""

    replace_attention: str | None = None
    """Name of an attention implementation of transformers, such as flash_attention_2, whose place
    distca takes, for scripts that allow certain names only. It needs the option transformers."""

    ping_pong: bool = False
    """Run the decoder layers of models that are built with attn_implementation="distca" on two
    halves of their tokens. Needs the option transformers."""

    def __post_init__(self) -> None:
        end_id = self.document_end_id
        check("document_end_id", end_id, end_id is None or end_id >= 0, "a token id, 0 or more")
        if self.document_end_id is not None and self.document_positions is not None:
            raise ValueError(
                f"document_end_id is {self.document_end_id} and document_positions "
                f"{self.document_positions!r}; expected one of them"
            )
        if self.ping_pong and not self.transformers:
            raise ValueError(
                "ping_pong is True, but transformers is False; expected both: in other scripts, "
                "wrap blocks in distca.PingPong"
            )
        if self.replace_attention is not None and not self.transformers:
            raise ValueError(
                f"replace_attention is {self.replace_attention!r}, transformers False; expected "
                "both: models of transformers have attention implementations"
            )
        for name in ("document_end_id", "document_positions"):
            value = getattr(self, name)
            if value is not None and not self.patch_sdpa:
                raise ValueError(
                    f"{name} is {value!r}, patch_sdpa False; expected both: it says where "
                    "documents of scaled_dot_product_attention begin"
                )


SETTINGS = (Options, Watching, Launch)  # a flag for each field


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m distca.run",
        description="Runs a training script with balanced attention. Flags before the script are "
        "distca's, everything after it is the script's own.",
    )
    for kind in SETTINGS:
        add_flags(flags, kind)
    flags.add_argument("-m", dest="is_module", action="store_true", help="run script as a module")
    flags.add_argument("script", help="path of the Python script to run; with -m a module's name")
    flags.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")
    return flags


@record
def main(arguments: Sequence[str] | None = None) -> None:
    flags = parser()
    parsed = flags.parse_args(arguments)
    script = Path(parsed.script)
    if not parsed.is_module and not script.is_file():
        flags.error(f"script {parsed.script} does not exist")
    try:
        options, watching, launch = (from_flags(parsed, kind) for kind in SETTINGS)
    except ValueError as error:
        flags.error(str(error))
    session.configure(options, watching)
    if launch.patch_sdpa:
        scope.patch_torch()
    if (launch.document_end_id, launch.document_positions) != (None, None):
        plain.derive_documents(launch.document_end_id, launch.document_positions)
    if launch.transformers:
        integration = importlib.import_module("distca.integrations.transformers")
        if launch.replace_attention is not None:
            integration.replace(launch.replace_attention)
        if launch.ping_pong:
            integration.ping_pong_built_models()
    sys.argv = [parsed.script, *parsed.arguments]
    if parsed.is_module:
        runpy.run_module(parsed.script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(script.resolve().parent)
        runpy.run_path(parsed.script, run_name="__main__")
    if watching.is_on and not session.has_opened():
        hint(
            f"{parsed.script} ended without a call of distca, so nothing was balanced or recorded; "
            "pass --patch-sdpa or --transformers, or call distca.plan in the script"
        )


if __name__ == "__main__":
    main()
