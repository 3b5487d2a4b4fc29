"""Builds distca/_C.so: one library of operators, loaded by torch.ops.load_library, no Python ABI."""

import os
from pathlib import Path

from setuptools import setup
from torch.utils.cpp_extension import CUDA_HOME, BuildExtension, CppExtension, CUDAExtension

ROOT = Path(__file__).parent
DEFAULT_CUDA_ARCHITECTURES = "8.0;9.0+PTX"


def wants_cuda() -> bool:
    if os.environ.get("DISTCA_SKIP_CUDA_BUILD") == "1":
        return False
    if os.environ.get("FORCE_CUDA") == "1" and CUDA_HOME is None:
        raise RuntimeError("FORCE_CUDA=1 but no CUDA toolkit was found; set CUDA_HOME or unset FORCE_CUDA")
    return CUDA_HOME is not None


def sources(with_cuda: bool) -> list[str]:
    patterns = ["planner/*.cpp", "attention/**/*.cpp", "transport/**/*.cpp", "ops/*.cpp"]
    if with_cuda:
        patterns.append("**/*.cu")
    found = [path for pattern in patterns for path in (ROOT / "csrc").glob(pattern)]
    if not with_cuda:
        found = [path for path in found if path.parent.name != "aten"]
    return sorted(str(path.relative_to(ROOT)) for path in found)


def extension(with_cuda: bool):
    cxx = ["-O3", "-std=c++20", "-fvisibility=hidden", "-Wall", "-Wno-unknown-pragmas", "-g0"]
    arguments = {"name": "distca._C", "sources": sources(with_cuda), "include_dirs": [str(ROOT / "csrc")]}
    if not with_cuda:
        return CppExtension(**arguments, extra_compile_args={"cxx": cxx})
    os.environ.setdefault("TORCH_CUDA_ARCH_LIST", DEFAULT_CUDA_ARCHITECTURES)
    return CUDAExtension(
        **arguments,
        define_macros=[("DISTCA_WITH_CUDA", None)],
        extra_compile_args={"cxx": cxx, "nvcc": ["-O3", "-std=c++20", "--expt-relaxed-constexpr"]},
    )


os.environ.setdefault("MAX_JOBS", "2")
setup(
    ext_modules=[extension(wants_cuda())],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
)
