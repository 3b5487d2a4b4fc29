"""Builds distca/_C.so: one library of operators, loaded by torch.ops.load_library, no Python ABI.

Environment: DISTCA_SKIP_CUDA_BUILD=1 leaves CUDA out, FORCE_CUDA=1 requires it. By default CUDA is
built if nvcc is installed. TORCH_CUDA_ARCH_LIST and MAX_JOBS work as in torch, except that 9.0 is
built as 9.0a, which the Hopper kernels need. Without 9.0 or 9.0a in the list they are left out.
"""

import os
import re
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
DEFAULT_CUDA_ARCHITECTURES = "8.0+PTX;9.0a"
CXX_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-fopenmp", "-Wall", "-g0"]
JOB_BYTES = 2 * 2**30  # a file with torch's headers takes 1.1 GiB, a kernel less
ROOMS_WITHOUT_TORCH = ("core", "planner")
NVCC_FLAGS = ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]


def wants_cuda() -> bool:
    if os.environ.get("DISTCA_SKIP_CUDA_BUILD") == "1":
        return False
    can = CUDA_HOME is not None and torch.version.cuda is not None
    if os.environ.get("FORCE_CUDA") == "1" and not can:
        raise RuntimeError(
            f"FORCE_CUDA=1, but the CUDA toolkit is {CUDA_HOME or 'not found'} and torch's CUDA is "
            f"{torch.version.cuda or 'none'}; set CUDA_HOME and install a CUDA build of torch"
        )
    return can


def cuda_architectures(listed: str) -> str:
    """`listed` as in TORCH_CUDA_ARCH_LIST, with 9.0 made 9.0a. PTX of 9.0a runs nowhere else, so
    that a +PTX goes to the lowest other architecture (8.0 where there is none), which gives PTX for
    every later card."""
    names = listed.replace("Hopper", "9.0+PTX").replace(" ", ";").split(";")
    names = [name for name in names if name]
    if names == ["native"]:
        devices = [torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())]
        if (9, 0) not in devices:
            return listed
        names = [f"{major}.{minor}" for major, minor in sorted(set(devices))]
    hopper = [name for name in names if name in ("9.0", "9.0a", "9.0+PTX", "9.0a+PTX")]
    others = [name for name in names if name not in hopper]
    if not hopper:
        return listed
    wants_ptx = any(name.endswith("+PTX") for name in hopper)
    if wants_ptx and not any(name.endswith("+PTX") for name in others):
        plain = [name for name in others if re.fullmatch(r"\d+\.\d", name)]
        lowest = min(plain, key=float, default="8.0")
        others = [*(name for name in others if name != lowest), lowest + "+PTX"]
    return ";".join([*others, "9.0a"])


def sources(with_cuda: bool, with_sm90: bool) -> list[str]:
    rooms = ("core", "planner", "attention", "transport", "ops")
    patterns = [f"{room}/**/*.cpp" for room in rooms]
    if with_cuda:
        patterns.append("**/*.cu")
    found = [path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)]
    if not with_cuda:
        found = [path for path in found if path.parent.name != "aten"]
    if not with_sm90:
        names = {"sm90", "peer"}
        found = [path for path in found if path.parent.name not in names]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension(with_cuda: bool):
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or DEFAULT_CUDA_ARCHITECTURES
    architectures = cuda_architectures(architectures) if with_cuda else ""
    with_sm90 = "9.0a" in architectures.split(";")
    arguments = {
        "name": "distca._C",
        "sources": sources(with_cuda, with_sm90),
        "include_dirs": [str(ROOT / "csrc")],
        "extra_link_args": ["-fopenmp"],
    }
    if not with_cuda:
        return CppExtension(**arguments, extra_compile_args={"cxx": CXX_FLAGS})
    os.environ["TORCH_CUDA_ARCH_LIST"] = architectures
    macros = ["DISTCA_WITH_CUDA", *(["DISTCA_WITH_SM90"] if with_sm90 else [])]
    return CUDAExtension(
        **arguments,
        define_macros=[(name, None) for name in macros],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    )


def join_rooms(files: list[str], folder: Path) -> list[str]:
    """Write one C++ file into `folder` for each room that includes PyTorch's headers. The file
    includes all C++ files of the room, so the headers are parsed only once. Leave the files of
    other rooms separate: joining them saves no time, and GCC inlines less in large files. Return
    the files to compile."""
    rooms: dict[str, list[str]] = {}
    alone = []
    for file in files:
        room = Path(file).parts[1]
        is_joined = file.endswith(".cpp") and room not in ROOMS_WITHOUT_TORCH
        (rooms.setdefault(room, []) if is_joined else alone).append(file)
    folder.mkdir(parents=True, exist_ok=True)
    joined = []
    for room, members in rooms.items():
        path = folder / f"{room}.cpp"
        text = "".join(f'#include "{ROOT / member}"\n' for member in members)
        if not path.is_file() or path.read_text() != text:
            path.write_text(text)
        joined.append(str(path.relative_to(ROOT)))
    return joined + alone


class Build(BuildExtension):
    def build_extension(self, ext) -> None:
        listed, ext.sources = ext.sources, join_rooms(ext.sources, ROOT / "build" / "rooms")
        super().build_extension(ext)
        ext.sources = listed


def num_jobs() -> int:
    """One for each core, but at most as many as the memory holds."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    if limit.is_file() and (text := limit.read_text().strip()).isdecimal():
        memory = min(memory, int(text))
    return max(1, min(len(os.sched_getaffinity(0)), memory // JOB_BYTES))


os.environ.setdefault("MAX_JOBS", str(num_jobs()))
TORCH = ".".join(torch.__version__.split(".")[:2])
setup(
    install_requires=[f"torch=={TORCH}.*", "numpy"],  # the library serves one minor version
    ext_modules=[extension(wants_cuda())],
    cmdclass={"build_ext": Build.with_options(no_python_abi_suffix=True)},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},  # the library uses nothing of Python
)
