"""The standard output of distca's commands."""

import os
import sys


def show(text: str) -> None:
    """Print what a command found. If its reader has closed the pipe, end the command quietly."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes at its end
        sys.exit(1)  # as Python ends if it finds the pipe closed, without the traceback
