"""Launcher: `torchrun ... -m distca.run [flags] script.py [arguments]` runs the script with distca
configured by flags; the script sees its own arguments only. `[flags] -m module [arguments]` runs a
module, as Python's own -m does."""

import argparse
import importlib
import importlib.util
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from distca import scope
from distca.integrations import plain
from distca.options import Options, add_flags, check, from_flags
from distca.planning.serving import serve_session
from distca.ranks import session
from distca.ranks.hints import hint
from distca.ranks.world import World, check_servers
from distca.watching.settings import Watching


@dataclass(frozen=True, kw_only=True)
class Launch:
    """Options of the launcher, for scripts that do not call distca."""

    patch_sdpa: bool = False
    """Replace torch.nn.functional.scaled_dot_product_attention for the whole process."""

    document_end_id: int | None = None
    """Token id that ends each document in the tokens of the script's model. Documents are read from
    it, so the script needs no edit. Requires patch_sdpa."""

    document_positions: str | None = None
    """Name of the model's argument whose positions restart at 0 with each document. Documents are
    read from it, so the script needs no edit. Requires patch_sdpa."""

    transformers: bool = False
    """Register attn_implementation="distca" with transformers for the script."""

    replace_attention: str | None = None
    """Name of the transformers attention implementation that distca replaces, such as
    flash_attention_2, for scripts that accept certain names only. Requires transformers."""

    ping_pong: bool = False
    """Run the decoder layers of models that are built with attn_implementation="distca" on two
    halves of their tokens. Requires transformers."""

    megatron: bool = False
    """Balance packed sequences in the attention of every Megatron-Core model that the script
    builds."""

    attention_servers: str | None = None
    """Ranks that serve attention and do not run the script: a number N for the last N ranks of each
    node, or a list of ranks, "3,7" ("7," for one rank). The other ranks run the script in a process
    group of their own. None: all ranks run it."""

    def __post_init__(self) -> None:
        if self.attention_servers is not None:
            ranks_of(self.attention_servers, 1, 1)
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


def ranks_of(servers: str, num_ranks: int, ranks_per_node: int) -> tuple[int, ...]:
    """Return the ranks that Launch.attention_servers names."""
    entries = servers.removesuffix(",").split(",")
    is_valid = all(entry.isdecimal() and int(entry) > 0 for entry in entries)
    expected = 'a positive number of ranks, or a list of ranks without 0, such as "3,7"'
    check("attention_servers", servers, is_valid, expected)
    if "," in servers:
        return tuple(map(int, entries))
    first = ranks_per_node - int(servers)
    return tuple(rank for rank in range(num_ranks) if rank % ranks_per_node >= first)


def join_world(servers: str, options: Options) -> World:
    """Return the world of all ranks. On a rank that runs the script, change torchrun's variables so
    that its process group has such ranks only. LOCAL_RANK stays, because it selects the GPU."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    missing = [name for name in names if name not in os.environ]
    if missing:
        raise ValueError(
            f"attention_servers is {servers!r}, but {', '.join(missing)} are not set; expected "
            "torchrun, or another launcher that sets them"
        )
    rank, num_ranks, local_rank, ranks_per_node = (int(os.environ[name]) for name in names)
    if "," not in servers and num_ranks % ranks_per_node:
        raise ValueError(
            f"attention_servers is {servers!r}, a number for each node, but {num_ranks} ranks are "
            f"not nodes of {ranks_per_node}; expected a list of ranks"
        )
    chosen = ranks_of(servers, num_ranks, ranks_per_node)
    try:
        check_servers(chosen, num_ranks, options)
    except ValueError as error:
        raise ValueError(f"attention_servers is {servers!r}: {error}") from error
    store, *_ = next(dist.rendezvous("env://"))
    if rank not in chosen:
        trainers = [each for each in range(num_ranks) if each not in chosen]
        first = rank - local_rank
        on_node = sum(first <= each < first + ranks_per_node for each in trainers)
        values = {"RANK": trainers.index(rank), "WORLD_SIZE": len(trainers)}
        values |= {f"ROLE_{name}": value for name, value in values.items()}
        for name, value in {**values, "LOCAL_WORLD_SIZE": on_node}.items():
            os.environ[name] = str(value)
    return World(dist.PrefixStore("distca", store), rank, num_ranks, chosen)


def serve_all_sessions() -> None:
    """Serve attention until the ranks that run the script have ended."""
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    while (opened := session.serve_in_world()) is not None:
        serve_session(opened)


SETTINGS = (Options, Watching, Launch)  # a flag for each field
PACKAGES = {  # that flags need
    "transformers": 'transformers (pip install "distca[transformers]")',
    "megatron": "Megatron-Core (pip install megatron-core)",
}


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m distca.run",
        usage="torchrun ... -m distca.run [flags] script.py [arguments], with flags as in --help",
        description="Runs a training script with balanced attention. Flags before the script are "
        "distca's, everything after it is the script's own.",
    )
    for kind in SETTINGS:
        add_flags(flags, kind)
    flags.add_argument("-m", dest="is_module", action="store_true", help="run script as a module")
    flags.add_argument("script", help="path of the Python script to run; with -m a module's name")
    rest = flags.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="the script's own arguments"
    )
    rest.required = False  # Python 3.11 says otherwise in errors
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
    for package in PACKAGES:
        if getattr(launch, package) and importlib.util.find_spec(package) is None:
            flags.error(f"--{package} needs {PACKAGES[package]}, which is not installed")
    session.configure(options, watching)
    num_ranks = int(os.environ.get("WORLD_SIZE", "1"))  # of all: join_world changes the variable
    world = None
    if launch.attention_servers is not None:
        try:
            world = join_world(launch.attention_servers, options)
        except ValueError as error:
            flags.error(str(error))
        session.join_world(world)
        if world.rank in world.servers:
            return serve_all_sessions()
    if not parsed.is_module:
        sys.path[0] = str(script.resolve().parent)  # Megatron-LM's scripts lie beside its package
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
    if launch.megatron:
        importlib.import_module("distca.integrations.megatron").install()
    sys.argv = [parsed.script, *parsed.arguments]
    try:
        if parsed.is_module:
            runpy.run_module(parsed.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(parsed.script, run_name="__main__")
    finally:
        if world is not None:
            world.end()
    is_shared = options.enabled and num_ranks > 1
    if (watching.is_on or is_shared) and not session.has_opened():
        hint(
            f"{parsed.script} ended without a plan, so nothing was balanced or recorded; "
            + ways_to_plan(launch)
        )


def ways_to_plan(launch: Launch) -> str:
    """Return how the script could have got plans."""
    ways = ["--transformers"] * (not launch.transformers) + ["--megatron"] * (not launch.megatron)
    if not launch.patch_sdpa:
        ways = ["--patch-sdpa", *ways]
    elif launch.document_end_id is None and launch.document_positions is None:
        ways = ["--document-end-id", "--document-positions"]
    return f"pass {' or '.join(ways)}, or call distca.plan in the script"


if __name__ == "__main__":
    main()
