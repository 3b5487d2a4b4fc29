"""setuptools' build backend, with the PyTorch of the environment that distca is installed into.

An isolated build does not see that environment; it would compile against the newest PyTorch, with
which the library cannot be loaded beside another. pip's isolation runs the environment's own
Python, whose site-packages are known. Other installers get a PyTorch for the build.
"""

import importlib.util
import site
import sysconfig

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403  every hook that is not below

OLDEST_TORCH = "torch>=2.11"


def _has_torch() -> bool:
    return importlib.util.find_spec("torch") is not None


if not _has_torch():
    site.addsitedir(sysconfig.get_paths()["purelib"])  # last on the path: gives what is missing


def _requirements(hook: str, config_settings) -> list[str]:
    # setuptools' hooks run setup.py, which imports torch.
    return getattr(build_meta, hook)(config_settings) if _has_torch() else [OLDEST_TORCH]


def get_requires_for_build_wheel(config_settings=None) -> list[str]:
    return _requirements("get_requires_for_build_wheel", config_settings)


def get_requires_for_build_editable(config_settings=None) -> list[str]:
    return _requirements("get_requires_for_build_editable", config_settings)


def get_requires_for_build_sdist(config_settings=None) -> list[str]:
    return _requirements("get_requires_for_build_sdist", config_settings)
