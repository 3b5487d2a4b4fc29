"""The package: sources, version, metadata, and the PyTorch of a build."""

import re
import sys
import tarfile
from pathlib import Path

import pytest
import setuptools
import torch
from module_files import module_of
from packaging.version import Version
from processes import run_command

import distca
from distca import _torch_private

ROOT = Path(__file__).parent.parent
SOURCES = ("csrc", "distca", "tests", "examples", "tools", "docs")
SUFFIXES = {".h", ".cuh", ".cpp", ".cu", ".txt", ".py", ".typed", ".md"}


@pytest.mark.skipif(
    Version(setuptools.__version__) < Version("77"), reason="needs setuptools 77 or newer"
)
def test_the_source_distribution_builds_on_any_machine(tmp_path):
    command = ["setup.py", "-q", "egg_info", "-e", tmp_path, "sdist", "-d", tmp_path]
    result = run_command([sys.executable, *map(str, command)], cwd=ROOT, timeout_s=60)
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("*.tar.gz")
    assert archive.name == f"distca-{distca.__version__}.tar.gz"
    with tarfile.open(archive) as packed:
        names = {name.partition("/")[2] for name in packed.getnames()}
        metadata = packed.extractfile(f"distca-{distca.__version__}/PKG-INFO").read().decode()
    wanted = {
        path.relative_to(ROOT).as_posix()
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in SUFFIXES and "__pycache__" not in path.parts
    }
    assert len(wanted) > 150 and wanted - names == set(), "also the kernels, without a CUDA build"
    assert {"LICENSE", "CHANGELOG.md", "Makefile", "pyproject.toml", "setup.py"} <= names
    assert not [name for name in names if name.endswith(".so") or "__pycache__" in name]
    assert "License-Expression: Apache-2.0" in metadata and "Typing :: Typed" in metadata
    assert "Author: distca contributors" in metadata and "arxiv.org" in metadata
    minor = ".".join(torch.__version__.split(".")[:2])
    assert f"Requires-Dist: torch=={minor}.*" in metadata, "that of the build"


def test_one_version():
    header = (ROOT / "csrc" / "ops" / "version.h").read_text()
    code = int(re.search(r"kVersion = (\d+)", header)[1])
    assert torch.ops.distca.version() == code
    assert distca.__version__ == f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    newest = re.search(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[1]
    assert newest.rstrip(",") == distca.__version__


def test_the_newest_torch_for_pipelines_is_one_that_wheels_are_tested_with():
    text = (ROOT / "tools" / "wheels.py").read_text()
    (versions,) = re.findall(r"^VERSIONS = \((.*)\)$", text, re.MULTILINE)
    assert versions.endswith('"{}.{}"'.format(*_torch_private.NEWEST_WITH_STAGES))
    assert '"test_pipelining.py"' in text


@pytest.mark.parametrize("gib, num_jobs", [(1, 1), (5, 2), (1000, 16)])
def test_compilers_fill_the_cores_as_far_as_the_memory_reaches(monkeypatch, gib, num_jobs):
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    monkeypatch.setenv("DISTCA_SKIP_CUDA_BUILD", "1")
    monkeypatch.setenv("MAX_JOBS", "1")
    build = module_of(ROOT / "setup.py")
    monkeypatch.setattr(build.os, "sched_getaffinity", lambda process: set(range(16)))
    monkeypatch.setattr(build.os, "sysconf", lambda name: 2**15 if "SIZE" in name else gib * 2**15)
    monkeypatch.setattr(build.Path, "is_file", lambda path: False)
    assert build.num_jobs() == num_jobs


def backend():
    return module_of(ROOT / "tools" / "build_backend.py")


@pytest.mark.parametrize("kind", ["wheel", "editable", "sdist"])
def test_a_build_requires_torch_only_if_none_is_installed(monkeypatch, kind):
    build_backend = backend()
    hook = f"get_requires_for_build_{kind}"
    monkeypatch.setattr(build_backend.build_meta, hook, lambda settings: ["of setuptools"])
    assert getattr(build_backend, hook)() == ["of setuptools"]
    monkeypatch.setattr(build_backend, "_has_torch", lambda: False)
    assert getattr(build_backend, hook)() == [build_backend.OLDEST_TORCH]


def test_an_isolated_build_finds_the_torch_of_its_environment(tmp_path):
    """Like pip's isolation, the build runs the environment's Python without its site-packages."""
    script = tmp_path / "isolated.py"
    outside = {str(Path(module.__file__).parents[1]) for module in (torch, distca)}
    script.write_text(
        "import importlib.util, sys, sysconfig\n"
        f"sys.path = [path for path in sys.path if path not in {outside!r}]\n"
        f"sys.path.append({str(tmp_path)!r})\n"
        "assert importlib.util.find_spec('torch') is None\n"
        f"sysconfig.get_paths = lambda: {{'purelib': {str(Path(torch.__file__).parents[1])!r}}}\n"
        f"sys.path.insert(0, {str(ROOT / 'tools')!r})\n"
        "import build_backend\n"
        "assert build_backend._has_torch()\n"
    )
    site_packages = Path(setuptools.__file__).parents[1]
    for name in ("setuptools", "_distutils_hack"):
        (tmp_path / name).symlink_to(site_packages / name)
    result = run_command([sys.executable, "-S", script], timeout_s=60, env={})
    assert result.returncode == 0, result.stderr


def test_the_import_does_not_load_the_compiler():
    """The compiler and the sharding modules would each add 0.3 s or more to the import."""
    code = "import sys, distca; print(*sys.modules)"
    result = run_command([sys.executable, "-c", code], cwd=ROOT)
    assert result.returncode == 0, result.stderr
    loaded = set(result.stdout.split())
    assert "distca.pingpong.pingpong" in loaded
    heavy = {
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
    }
    assert not loaded & heavy
