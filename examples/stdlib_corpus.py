"""Real documents that every machine has: the sources of Python's standard library.

A document is a top-level part of a module: a class, a function, or the lines before them. There are
more than ten thousand. Most have a few hundred bytes, and the longest has hundreds of thousands. A
token is a byte.
"""

import functools
import random
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

VOCAB_SIZE = 256
IGNORE_INDEX = -100  # cross_entropy's default

_TOP_LEVEL_PART = re.compile(rb"\n\n+(?=class |def |async def |@)")


def source_files() -> list[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if "site-packages" not in path.parts]
    return sorted(path for path in files if "dist-packages" not in path.parts)


@functools.cache
def all_documents() -> list[bytes]:
    parts = [part for path in source_files() for part in _TOP_LEVEL_PART.split(path.read_bytes())]
    documents = [part for part in parts if part]
    if not documents:
        root = sysconfig.get_path("stdlib")
        raise FileNotFoundError(
            f"no *.py under {root}; use a Python that ships its library's sources"
        )
    return documents


@dataclass(frozen=True)
class Pack:
    """Consecutive documents with an exact number of tokens and no padding."""

    tokens: Tensor  # uint8 [tokens]
    lengths: list[int]

    @property
    def num_predicted(self) -> int:
        """Count the tokens that have a successor in their document."""
        return len(self.tokens) - len(self.lengths)

    def labels(self) -> Tensor:
        """Return int64 [tokens]: the next token of the document, or IGNORE_INDEX at its end."""
        labels = self.tokens.roll(-1).long()
        labels[torch.tensor(self.lengths).cumsum(0) - 1] = IGNORE_INDEX
        return labels


class Corpus:
    """An endless stream of documents in an order fixed by the seed, cut into packs.

    Documents are truncated to `context` tokens, so that no document fills several steps.
    """

    def __init__(self, seed: int, context: int) -> None:
        self._context = context
        self._stream = self._all(random.Random(seed))
        self._rest = b""

    def next_document(self) -> bytes:
        return next(self._stream)[: self._context]

    def next_pack(self, num_tokens: int) -> Pack:
        """Return the next pack. A document that does not fit is cut, and continues in the next."""
        parts: list[bytes] = []
        room = num_tokens
        while room > 0:
            document = self._rest or self.next_document()
            parts.append(document[:room])
            self._rest = document[room:]
            room -= len(parts[-1])
        tokens = torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)
        return Pack(tokens, [len(part) for part in parts])

    @staticmethod
    def _all(generator: random.Random) -> Iterator[bytes]:
        documents = all_documents()
        while True:
            yield from generator.sample(documents, len(documents))
