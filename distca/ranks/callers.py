"""Identify the module that calls attention, by a number and a name that are equal on all ranks.

Ranks compare the number in each call. So a rank that leaves a layer out, or runs its layers in
another order, is found before rows of one layer serve another.
"""

import contextlib
import gc
import sys
from pathlib import Path
from types import CodeType, FrameType
from weakref import ref

import torch
from torch import nn

from distca import ops

UNKNOWN = -1
MAX_FRAMES = 16  # between attention and the module that calls it
OWN_FRAMES = 4  # of current(), and of core_attention() and its parts, which are not modules
_OWN_FOLDER = str(Path(__file__).parents[1])

# By id, which takes half as long as a WeakKeyDictionary: its number, and a reference that removes
# the entry when the module dies.
_modules: dict[int, tuple[int, ref]] = {}
_methods: dict[int, tuple[CodeType, bool]] = {}  # by id; a hash of code reads all of it


def number_of(module: nn.Module) -> int:
    """Returns the position of `module` in its model's named_modules().

    Returns UNKNOWN if no other module contains it: nothing tells such modules apart.
    """
    if id(module) not in _modules:
        _keep(module, UNKNOWN)
        _number_all_modules()
    return _modules[id(module)][0]


def _keep(module: nn.Module, number: int) -> None:
    key = id(module)
    _modules[key] = number, ref(module, lambda _: _modules.pop(key, None))


def current() -> int:
    """Returns the number of the module whose method is innermost on the stack, apart from distca's.

    Returns UNKNOWN if there is no such module, and in compiled code, which serves many layers.
    """
    if torch.compiler.is_compiling():
        return UNKNOWN
    try:
        frame: FrameType | None = sys._getframe(OWN_FRAMES)
    except ValueError:  # no Python code calls attention
        return UNKNOWN
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        method = _methods.get(id(code))
        if method[1] if method is not None else _is_method(code):
            # The slow part: Python makes a dictionary of all locals.
            module = frame.f_locals.get("self")
            if id(module) in _modules or isinstance(module, nn.Module):
                return number_of(module)
        frame = frame.f_back
    return UNKNOWN


def _is_method(code: CodeType) -> bool:
    """Return whether `code` is the code of a method outside distca."""
    takes_self = code.co_argcount > 0 and code.co_varnames[0] == "self"
    is_method = takes_self and not code.co_filename.startswith(_OWN_FOLDER)
    _methods[id(code)] = code, is_method
    return is_method


def _number_all_modules() -> None:
    """Numbers the modules of all models in memory: a module does not know its model."""
    # A module that is being created or destroyed may lack the attribute `_modules`.
    modules = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), nn.Module) and "_modules" in vars(each)
    ]
    parts = {id(part) for module in modules for part in module._modules.values()}
    for model in (module for module in modules if id(module) not in parts):
        with contextlib.suppress(AttributeError):  # a part of the model may lack it, too
            for number, (name, module) in enumerate(model.named_modules()):
                if name:
                    _keep(module, number)
                    ops.name_caller(number, name)
