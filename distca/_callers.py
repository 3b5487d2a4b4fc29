"""Which module calls attention: numbers and names that are alike on all ranks of a model.

Ranks compare the number with each call, so that a rank that runs its layers in another order, or
leaves one out, is found before rows of one layer serve another.
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
    """Return the place of `module` among all modules of its model, from 0; UNKNOWN for one that is
    part of no other module, which nothing tells from its like."""
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
    """The number of the module whose method is the innermost one on the stack; UNKNOWN where there
    is none, and in compiled code, which serves many layers."""
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
    """Numbers the modules of every model that is alive: a model does not know that it is one."""
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    parts = {
        id(part) for module in modules for part in module._modules.values() if part is not None
    }
    for model in (module for module in modules if id(module) not in parts):
        for number, (name, module) in enumerate(model.named_modules()):
            if name:
                _keep(module, number)
                torch.ops.distca.name_caller(number, name)
