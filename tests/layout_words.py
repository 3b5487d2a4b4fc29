"""What tests read from a layout's words, of a plan of one round; see csrc/ops/layout_words.h."""

from torch import Tensor

NUM_RANKS, NUM_HOME_ROWS, NUM_ROUNDS = 4, 5, 9
HEADER_WORDS = 16  # then rows by peer: queries sent, queries received, keys sent, keys received


def num_rounds(layout: Tensor) -> int:
    return layout[NUM_ROUNDS].item()


def numbers_of_rows(layout: Tensor) -> tuple[int, int, int]:
    """Of a rank's own rows, of visiting queries and of visiting keys."""
    num_ranks = layout[NUM_RANKS].item()
    counts = layout[HEADER_WORDS : HEADER_WORDS + 4 * num_ranks].reshape(4, num_ranks).sum(1)
    return layout[NUM_HOME_ROWS].item(), counts[1].item(), counts[3].item()
