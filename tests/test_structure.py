"""The rooms and their one-way dependencies, asserted from the sources."""

import ast
import graphlib
import posixpath
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"
CXX_SUFFIXES = {".h", ".cuh", ".cpp", ".cu"}
ROOMS = ("core", "planner", "attention", "transport", "ops", "tests")

NO_TORCH_NO_CUDA = r"torch/|ATen/|c10/|cuda"
# Room or file (the longest prefix counts): other rooms it may include, with the rooms inside them,
# and libraries it must not.
CXX_RULES = {
    "core": (set(), NO_TORCH_NO_CUDA),
    "planner": ({"core"}, NO_TORCH_NO_CUDA),
    "planner/model": ({"core"}, NO_TORCH_NO_CUDA),
    "planner/balance": ({"core", "planner/model"}, NO_TORCH_NO_CUDA),
    "planner/layout": ({"core", "planner/model"}, NO_TORCH_NO_CUDA),
    "attention": ({"core"}, r"torch/csrc/distributed/|nccl"),
    "attention/sm90": ({"core", "attention"}, r"torch/|ATen/|c10/"),
    "attention/sm90/backend.cpp": ({"core", "attention"}, r"torch/csrc/distributed/|nccl"),
    "transport": ({"core"}, r"$^"),
    "ops": ({"core", "planner", "attention", "transport"}, r"$^"),
    "tests": ({"core", "planner", "attention", "transport"}, r"torch/|ATen/|c10/"),
}
# Rooms that reach back ends through their table alone, and what would say that they do not.
ABOVE_BACKENDS = ("ops/", "planner/", "transport/")
A_BACKEND = re.compile(r"\bsm90\b|[Hh]opper|\b[Ww]aves?\b|attention(/|::)(aten|cpu)\b")
STANDARD_ROOMS = {"core", "planner"}  # they include the standard library and their like, no more
STANDARD_HEADER = re.compile(r"[a-z_0-9]+")

# Room of distca, a folder or a module: the other rooms it may import. `distca/__init__` may import
# any. A row for a file of a folder says all that this file may import, its own room included.
PYTHON_RULES = {
    "_library": set(),
    "ops": {"_library"},
    "_torch_private": set(),
    "_output": set(),
    "options": set(),
    "watching": set(),
    "ranks": {"_torch_private", "ops", "options", "watching"},
    "planning": {"_torch_private", "ops", "options", "ranks", "watching"},
    "attention": {"_torch_private", "ops", "planning", "ranks"},
    "scope": {"attention", "planning", "ranks"},
    "pingpong": {"_torch_private", "attention", "ops", "planning", "ranks", "scope"},
    "integrations": {
        "_torch_private",
        "attention",
        "ops",
        "options",
        "pingpong",
        "planning",
        "ranks",
        "scope",
        "watching",
    },
    "integrations/__init__": set(),
    "calibrate": {"_output", "ops", "options", "planning", "ranks"},
    "explain": {"_output", "options", "planning"},
    "simulate": {"_output", "options", "planning", "watching"},
    "report": {"_output", "watching"},
    "run": {"integrations", "options", "planning", "ranks", "scope", "watching"},
}
# Where alone a library may be imported.
LIBRARY_HOMES = {
    "matplotlib": ("watching/report.py",),
    "transformers": ("integrations/transformers.py", "integrations/transformers_masks.py"),
    "megatron": ("integrations/megatron.py", "integrations/megatron_batches.py"),
    "accelerate": ("integrations/trainer.py",),
    "torchtitan": (
        "integrations/torchtitan.py",
        "integrations/torchtitan_batches.py",
        "integrations/torchtitan_pipelines.py",
    ),
    "spmd_types": ("integrations/torchtitan.py",),
    "torch.utils.tensorboard": ("watching/monitor.py",),
}
PRIVATE_TORCH = re.compile(r"(torch|dist)\.(\w+\.)*_(?!_)")
LAUNCHER = "run.py"  # reads and sets the variables of torchrun
MAY_PRINT = (
    "_output.py",
    "run.py",
)


def includes_of(text: str) -> list[tuple[str, str]]:
    """(opening bracket or quote, header) of every include."""
    return re.findall(r"^\s*#\s*include\s*([<\"])([^>\"]+)[>\"]", text, re.MULTILINE)


def resolve(header: str, path: str) -> str | None:
    """Path under csrc/ of a header that `path` includes in quotes; None if there is none."""
    for folder in (posixpath.dirname(path), ""):
        found = posixpath.normpath(posixpath.join(folder, header))
        if (CSRC / found).is_file():
            return found
    return None


def libraries_reached(path: str, text: str, seen: set[str]) -> set[str]:
    """Headers in angle brackets that a file includes, itself or through files of csrc/."""
    reached = set()
    for bracket, header in includes_of(text):
        target = resolve(header, path)
        if bracket == "<":
            reached.add(header)
        elif target is not None and target not in seen:
            seen.add(target)
            reached |= libraries_reached(target, (CSRC / target).read_text(), seen)
    return reached


def cxx_violations(path: str, text: str) -> list[str]:
    """What the file `path` (under csrc/) includes although its room forbids it."""
    rooms = [room for room in CXX_RULES if f"{path}/".startswith(f"{room}/")]
    if not rooms:
        return [f"{path} is in no room"]
    own = max(rooms, key=len)
    allowed, forbidden = CXX_RULES[own]
    folders = tuple(room + "/" for room in allowed | {own})
    found = []
    for bracket, header in includes_of(text):
        target = resolve(header, path)
        if bracket == '"' and (target is None or not target.startswith(folders)):
            found.append(f"{path} includes {header}")
        is_standard = STANDARD_HEADER.fullmatch(header)
        if bracket == "<" and STANDARD_ROOMS & set(rooms) and not is_standard:
            found.append(f"{path} includes <{header}>, not the standard library")
    for header in sorted(libraries_reached(path, text, {path})):
        if re.search(forbidden, header):
            found.append(f"{path} reaches <{header}>")
    return found


def backend_violations(path: str, text: str) -> list[str]:
    """Where the file `path` (under csrc/) knows back ends that only their table may know."""
    if path.startswith("attention/"):
        knows = "DISTCA_WITH_" in text and path != "attention/backends.cpp"
        return [f"{path} asks what was built"] * knows
    if path.startswith("transport/peer/") or not path.startswith(ABOVE_BACKENDS):
        return []
    return [f"{path} names {match[0]}" for match in A_BACKEND.finditer(text)]


def imports_of(tree: ast.AST) -> set[str]:
    """Full names of everything imported, also inside functions; `from a import b` is a and a.b."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            names |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return names


def calls_of(tree: ast.AST) -> set[str]:
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def attributes_of(tree: ast.AST) -> set[str]:
    return {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def import_violations(path: str, text: str) -> list[str]:
    """Imports of `path` (under distca/) that point the wrong way or belong to another file."""
    imported = imports_of(ast.parse(text))
    found = [f"{path} imports relatively" for name in imported if name.startswith(".")]
    for library, homes in LIBRARY_HOMES.items():
        if path not in homes and any(f"{name}.".startswith(f"{library}.") for name in imported):
            found.append(f"{path} imports {library}")
    if path == "__init__.py":
        return found
    module = path.removesuffix(".py")
    room = module.split("/")[0]
    if room not in PYTHON_RULES:
        return [*found, f"{path} is in no room"]
    allowed = PYTHON_RULES.get(module, PYTHON_RULES[room] | {room})
    # Names that are no room are those of `distca/__init__`: they hide the room that they come from.
    ours = {name.split(".")[1] for name in imported if name.startswith("distca.")}
    return found + [f"{path} imports distca.{name}" for name in sorted(ours - allowed)]


def import_cycle(texts: dict[str, str]) -> list[str]:
    """Modules, by path under distca/, that import each other in a circle; [] where none do."""
    modules = {
        "distca." + path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
        for path in texts
    }
    graph = {
        path: {modules[name] for name in imports_of(ast.parse(text)) & modules.keys()}
        for path, text in texts.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def habit_violations(path: str, text: str) -> list[str]:
    """Unpickling, printing, reading the environment, and torch where it belongs to another file,
    in `path` (under distca/)."""
    tree = ast.parse(text)
    imported, calls, attributes = imports_of(tree), calls_of(tree), attributes_of(tree)
    found = []
    if any(name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle") for name in imported):
        found.append(f"{path} imports a pickler")
    moves_objects = re.compile(r"(gather|scatter|broadcast|send|recv)_object")  # by pickling
    if "torch.load" in calls or any(map(moves_objects.search, calls)):
        found.append(f"{path} unpickles")
    if "print" in calls and path not in MAY_PRINT:
        found.append(f"{path} prints")
    names = imported | calls | attributes
    if path != "ops.py" and any(f"{name}.".startswith("torch.ops.distca.") for name in names):
        found.append(f"{path} calls torch.ops.distca; distca/ops.py has it typed")
    if path != "_torch_private.py" and any(map(PRIVATE_TORCH.match, names)):
        found.append(f"{path} uses private names of torch; their place is distca/_torch_private.py")
    reads = names & {"os.environ", "os.getenv", "os.environb", "os.putenv"}
    if reads and path != LAUNCHER:
        found.append(f"{path} reads the environment")
    return found


def cxx_files() -> list[Path]:
    return sorted(p for p in CSRC.rglob("*") if p.suffix in CXX_SUFFIXES)


def python_files() -> list[Path]:
    return sorted((ROOT / "distca").rglob("*.py"))


def test_rooms_of_cxx_depend_one_way():
    files = cxx_files()
    assert len(files) > 40
    for file in files:
        path = file.relative_to(CSRC).as_posix()
        assert cxx_violations(path, file.read_text()) == []


def test_back_ends_are_known_to_their_table_alone():
    for file in cxx_files():
        path = file.relative_to(CSRC).as_posix()
        assert backend_violations(path, file.read_text()) == []


@pytest.mark.parametrize(
    "path, text",
    [
        ("attention/attention.cpp", "#ifdef DISTCA_WITH_CUDA"),
        ("attention/cpu/backend.cpp", "#ifdef DISTCA_WITH_SM90"),
        ("ops/layout_tensor.cpp", '#include "attention/sm90/tiles.h"'),
        ("ops/layout_cache.cpp", "attention::aten::Waves waves;"),
        ("ops/core_attention.cpp", "return attention::cpu::forward(rows, params);"),
        ("planner/layout/layout.cpp", "// in the order of the Hopper kernels"),
    ],
)
def test_planted_knowledge_of_back_ends_is_found(path, text):
    assert backend_violations(path, text)


def test_every_room_was_seen():
    seen = {file.relative_to(CSRC).parts[0] for file in cxx_files()}
    assert seen == set(ROOMS)


def test_cxx_reads_no_environment():
    for file in cxx_files():
        assert not re.search(r"\bgetenv\s*\(|\bexit\s*\(", file.read_text()), file


def test_python_depends_one_way():
    files = python_files()
    assert len(files) >= 10
    for file in files:
        path = file.relative_to(ROOT / "distca").as_posix()
        assert import_violations(path, file.read_text()) == []


def python_texts() -> dict[str, str]:
    return {
        file.relative_to(ROOT / "distca").as_posix(): file.read_text() for file in python_files()
    }


def test_no_python_modules_import_each_other():
    assert import_cycle(python_texts()) == []


@pytest.mark.parametrize(
    "path, text",
    [
        ("planning/documents.py", "from distca.planning.plan import plan"),
        ("ranks/groups.py", "def f():\n    from distca.ranks import session"),
        ("simulate/scenario.py", "from distca.simulate import report"),
    ],
)
def test_planted_cycles_are_found(path, text):
    texts = python_texts()
    assert path in import_cycle({**texts, path: f"{texts[path]}\n{text}\n"})


def test_the_rules_of_python_are_one_way():
    graphlib.TopologicalSorter(PYTHON_RULES).prepare()  # raises where they are not
    seen = {path.removesuffix(".py").split("/")[0] for path in python_texts()}
    assert seen - {"__init__"} == {room.split("/")[0] for room in PYTHON_RULES}


def test_python_habits():
    for file in python_files():
        path = file.relative_to(ROOT / "distca").as_posix()
        assert habit_violations(path, file.read_text()) == []


@pytest.mark.parametrize(
    "path, header",
    [
        ("core/mask.cpp", "<ATen/core/Tensor.h>"),
        ("core/mask.cpp", "<gtest/gtest.h>"),
        ("core/mask.cpp", '"planner/model/cost.h"'),
        ("core/mask.cpp", '"attention/attention.h"'),
        ("planner/model/cost.cpp", "<torch/library.h>"),
        ("planner/model/cost.cpp", "<ATen/core/Tensor.h>"),
        ("planner/model/cost.cpp", "<gtest/gtest.h>"),
        ("planner/model/cost.cpp", '"attention/attention.h"'),
        ("planner/model/cost.cpp", '"../../ops/steps.h"'),
        ("planner/model/plan.cpp", '"../balance/assignment.h"'),
        ("planner/model/plan.cpp", '"../layout/visits.h"'),
        ("planner/balance/recut.cpp", '"planner/layout/layout.h"'),
        ("planner/balance/recut.cpp", '"../make_plan.h"'),
        ("planner/layout/rounds.cpp", '"../balance/assignment.h"'),
        ("planner/layout/rounds.cpp", '"../make_plan.h"'),
        ("attention/cpu/backend.cpp", '"planner/model/plan.h"'),
        ("attention/cpu/backend.cpp", '"../../transport/rows.h"'),
        ("attention/attention.h", "<torch/csrc/distributed/c10d/ProcessGroup.hpp>"),
        ("attention/attention.h", '"ops/steps.h"'),
        ("attention/sm90/forward.cu", "<ATen/core/Tensor.h>"),
        ("attention/sm90/forward.cu", '"../attention.h"'),
        ("attention/sm90/tiles.cpp", '"../backend.h"'),
        ("transport/rows.cpp", '"attention/attention.h"'),
        ("transport/process_group/process_group.cpp", '"planner/model/plan.h"'),
        ("transport/rows.cpp", '"ops/session.h"'),
        ("tests/planner_cost_test.cpp", "<torch/torch.h>"),
        ("elsewhere/file.cpp", "<vector>"),
    ],
)
def test_planted_includes_are_found(path, header):
    assert cxx_violations(path, f"#pragma once\n\n#include {header}\n")


@pytest.mark.parametrize(
    "path, header",
    [
        ("planner/model/cost.cpp", "<vector>"),
        ("planner/model/cost.cpp", '"plan.h"'),
        ("planner/balance/recut.cpp", '"../model/plan.h"'),
        ("planner/layout/rounds.cpp", '"planner/model/plan.h"'),
        ("planner/make_plan.cpp", '"balance/balancer.h"'),
        ("ops/planning.cpp", '"planner/layout/layout.h"'),
        ("attention/cpu/backend.cpp", '"../attention.h"'),
        ("attention/sm90/forward.cu", "<cuda_runtime.h>"),
        ("attention/sm90/backend.cpp", '"../backend.h"'),
        ("attention/sm90/forward.cu", '"core/task.h"'),
        ("planner/layout/layout.cpp", '"core/task.h"'),
        ("transport/rows.cpp", '"core/rows.h"'),
        ("transport/rows.cpp", '"transport/where.h"'),
        ("ops/steps.cpp", '"attention/attention.h"'),
    ],
)
def test_allowed_includes_pass(path, header):
    assert cxx_violations(path, f"#include {header}\n") == []


@pytest.mark.parametrize(
    "path, text",
    [
        ("planning/documents.py", "from distca.attention import core_attention"),
        ("planning/plan.py", "def f():\n    import distca.attention"),
        ("planning/plan.py", "from distca import attention"),
        ("planning/plan.py", "from distca import core_attention"),
        ("ranks/session.py", "from distca.planning.plan import plan"),
        ("ranks/session.py", "from distca.planning import plan"),
        ("watching/trace.py", "from distca import ops"),
        ("ops.py", "from distca import options"),
        ("watching/monitor.py", "from distca.ranks import session"),
        ("attention.py", "from distca.integrations import transformers"),
        ("attention.py", "from distca import scope"),
        ("attention.py", "from .planning import plan"),
        ("scope.py", "from distca.pingpong import PingPong"),
        ("report.py", "from distca.attention import core_attention"),
        ("planning/plan.py", "import matplotlib.pyplot as plt"),
        ("report.py", "import matplotlib.pyplot as plt"),
        ("attention.py", "def f():\n    from transformers import AutoModel"),
        ("integrations/transformers.py", "import torchtitan"),
        ("integrations/torchtitan.py", "from megatron.core import parallel_state"),
        ("watching/report.py", "from torch.utils.tensorboard import SummaryWriter"),
        ("watching/report.py", "from distca import report"),
        ("integrations/transformers.py", "from distca import report"),
        ("integrations/boundaries.py", "import transformers"),
        ("integrations/__init__.py", "from distca.integrations import transformers"),
        ("simulate/machine.py", "from distca.ranks import session"),
        ("explain/text.py", "from distca.simulate import scenario"),
        ("elsewhere.py", "import math"),
    ],
)
def test_planted_imports_are_found(path, text):
    assert import_violations(path, text)


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "print('here')",
        "import os\nvalue = os.environ['X']",
        "import os\nvalue = os.getenv('X')",
        "from os import environ",
        "import torch\ntorch.ops.distca.version()",
        "import torch\ntorch._C._current_graph_task_id()",
        "import torch.distributed as dist\ndist.distributed_c10d._world.pg_map",
        "from torch.utils import _pytree as pytree",
        "from torch.utils._pytree import tree_leaves",
        "import torch\nvalue = torch.ops.distca.plan.default",
    ],
)
def test_planted_habits_are_found(text):
    assert habit_violations("planning/plan.py", text)


@pytest.mark.parametrize(
    "path, text",
    [
        ("planning/plan.py", "from distca.planning.cost import AttentionShape"),
        ("planning/plan.py", "from distca.ranks import session"),
        ("scope.py", "from distca import attention"),
        ("integrations/transformers.py", "from distca.integrations import models"),
        ("__init__.py", "from distca.pingpong.pingpong import PingPong"),
    ],
)
def test_allowed_imports_pass(path, text):
    assert import_violations(path, text) == []


def test_the_launcher_may_print():
    assert habit_violations("run.py", "print('usage')") == []
