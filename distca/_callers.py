"""Identify the module that calls attention, by a number and a name that are equal on all ranks.

Ranks compare the number in each call. So a rank that leaves a layer out, or runs its layers in
another order, is found before rows of one layer serve another.
"""

import gc
import sys
from types import FrameType
from weakref import ref

import torch
from torch import nn

UNKNOWN = -1
MAX_FRAMES = 16  # between attention and the module that calls it

_numbers: dict[int, tuple[ref, int]] = {}  # by id; a WeakKeyDictionary takes twice the time


def number_of(module: nn.Module) -> int:
    """Returns the position of `module` in its model's named_modules().

    Returns UNKNOWN if no other module contains it: nothing tells such modules apart.
    """
    known = _numbers.get(id(module))
    if known is not None and known[0]() is module:
        return known[1]
    _keep(module, UNKNOWN)
    _number_all_modules()
    return _numbers[id(module)][1]


def _keep(module: nn.Module, number: int) -> None:
    key = id(module)
    _numbers[key] = ref(module, lambda _: _numbers.pop(key, None)), number


def current() -> int:
    """Returns the number of the module whose method is innermost on the stack.

    Returns UNKNOWN if there is no such module, and in compiled code, which serves many layers.
    """
    if torch.compiler.is_compiling():
        return UNKNOWN
    frame: FrameType | None = sys._getframe(1)
    for _ in range(MAX_FRAMES):
        if frame is None:
            break
        code = frame.f_code
        if code.co_argcount > 0 and code.co_varnames[0] == "self":
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module):
                return number_of(module)
        frame = frame.f_back
    return UNKNOWN


def _number_all_modules() -> None:
    """Numbers the modules of all models in memory: a module does not know its model."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {
        id(part) for module in modules for part in module._modules.values() if part is not None
    }
    for model in (module for module in modules if id(module) not in parts):
        for number, (name, module) in enumerate(model.named_modules()):
            if name:
                _keep(module, number)
                torch.ops.distca.name_caller(number, name)
