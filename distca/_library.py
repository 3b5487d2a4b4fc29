"""Load the library of operators, and implement what they have in Python: shapes without data for
torch.compile and fake tensors, and signal handlers."""

import mmap
import re
import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.library import register_fake

LIBRARY = Path(__file__).parent / "_C.so"


def _rebuild(library: Path) -> str:
    """The command that builds `library`, also where it lies among its sources."""
    root = library.parents[1]
    if (root / "setup.py").exists():
        return f"pip install --no-deps -e {root}"
    return "pip install --force-reinstall --no-deps ."


def _missing(library: Path) -> str:
    folders = (Path(entry or ".").resolve() / "distca" for entry in sys.path)
    hidden = next((each for each in folders if (each / library.name).exists()), None)
    if hidden is None:
        return f"{library} is missing; build it with `{_rebuild(library)}`"
    return (
        f"{library} is missing, and these sources hide the distca that is installed in {hidden}; "
        f"run from another folder, or build here too with `{_rebuild(library)}`"
    )


def built_for(library: Path) -> str:
    """The torch version that `library` was built against, e.g. '2.11.0'.

    Raises ImportError when the file is missing or is not a library of distca.
    """
    if not library.exists():
        raise ImportError(f"distca: {_missing(library)}")
    version = None
    if library.stat().st_size > 0:  # an empty file cannot be mapped
        with (
            library.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        ):
            match = re.search(rb"distca-built-for-torch:([^:\0]+):end", content)
            version = match[1].decode() if match else None
    if version is None:
        raise ImportError(
            f"distca: {library} is not distca's library; rebuild it with `{_rebuild(library)}`"
        )
    return version


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]


def load(library: Path = LIBRARY) -> None:
    """Registers torch.ops.distca.*; raises ImportError naming both versions if they differ in
    more than the patch."""
    expected, running = built_for(library), torch.__version__.split("+")[0]
    if _minor(expected) != _minor(running):
        raise ImportError(
            f"distca: the library was built for torch {expected}, but torch {running} is running; "
            f"rebuild it with `{_rebuild(library)}` in the environment that runs it"
        )
    torch.ops.load_library(str(library))


load()


def _results_of(q: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=dtype)


@register_fake("distca::core_attention")
def _(q, k, v, layout, rows, softmax_scale, group_name, num_kept_queries=0, num_kept_keys=0, **_):
    queries = num_kept_queries * q.shape[1] * q.shape[2]
    keys = num_kept_keys * k.shape[1] * (k.shape[2] + v.shape[2])
    return *_results_of(q, v), q.new_empty(queries + keys)


@register_fake("distca::attend")
def _(q, k, v, *others):
    return _results_of(q, v)


@register_fake("distca::core_attention_backward")
@register_fake("distca::attend_backward")
def _(grad_out, q, k, v, *others, **_):
    return tuple(tensor.new_empty(tensor.shape) for tensor in (q, k, v))


def _handle_signals() -> None:
    """Operators call this on the main thread while they wait for other ranks. Python runs pending
    handlers, such as Ctrl-C's, when a function begins, and their exceptions pass through the
    operator to its caller."""


_implementation = torch.library.Library("distca", "IMPL")
_implementation.impl("handle_signals", _handle_signals, "CompositeExplicitAutograd")
