"""Run signal handlers, such as Ctrl-C's, while an operator waits for other ranks."""

import torch

from distca import _library  # noqa: F401  the operators must be there first

# Operators call this on the main thread while they wait. Python runs pending handlers when a
# function begins, and their exceptions pass through the operator to its caller.
_implementation = torch.library.Library("distca", "IMPL")


def _handle_signals() -> None:
    pass


_implementation.impl("handle_signals", _handle_signals, "CompositeExplicitAutograd")
