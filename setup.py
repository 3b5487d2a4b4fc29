"""Builds distca/_C.so: one library of operators, loaded by torch.ops.load_library, no Python ABI.

Environment: DISTCA_SKIP_CUDA_BUILD=1 leaves CUDA out, FORCE_CUDA=1 demands it; without either it is
built where nvcc is found. TORCH_CUDA_ARCH_LIST and MAX_JOBS as everywhere in torch.
"""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0+PTX"
CXX_FLAGS = ["-O3", "-std=c++20", "-fvisibility=hidden", "-fopenmp", "-Wall", "-g0"]
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


def sources(with_cuda: bool) -> list[str]:
    patterns = ["planner/*.cpp", "attention/**/*.cpp", "transport/**/*.cpp", "ops/*.cpp"]
    if with_cuda:
        patterns.append("**/*.cu")
    found = [path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)]
    if not with_cuda:
        found = [path for path in found if path.parent.name != "aten"]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension(with_cuda: bool):
    arguments = {
        "name": "distca._C",
        "sources": sources(with_cuda),
        "include_dirs": [str(ROOT / "csrc")],
        "extra_link_args": ["-fopenmp"],
    }
    if not with_cuda:
        return CppExtension(**arguments, extra_compile_args={"cxx": CXX_FLAGS})
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
    return CUDAExtension(
        **arguments,
        define_macros=[("DISTCA_WITH_CUDA", None)],
        extra_compile_args={"cxx": CXX_FLAGS, "nvcc": NVCC_FLAGS},
    )


os.environ.setdefault("MAX_JOBS", "2")
setup(
    ext_modules=[extension(wants_cuda())],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
