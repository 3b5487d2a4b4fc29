"""What tests read from a layout's words, of a plan of one round; see csrc/ops/layout_words.h."""

from torch import Tensor

STEP, NUM_RANKS, NUM_HOME_ROWS, NUM_ROUNDS = 2, 4, 5, 9
RANK = 16
HEADER_WORDS = 17  # then rows by peer: queries sent, queries received, keys sent, keys received


def backend_id(name: str) -> int:
    """What stands for a back end in layouts; see id_of in csrc/attention/backend.h."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value


def num_rounds(layout: Tensor) -> int:
    return layout[NUM_ROUNDS].item()


def numbers_of_rows(layout: Tensor) -> tuple[int, dict[str, int]]:
    """Of a rank's own rows; of those that visit it, and of those that other ranks return to it."""
    num_ranks, rank = layout[NUM_RANKS].item(), layout[RANK].item()
    counts = layout[HEADER_WORDS : HEADER_WORDS + 4 * num_ranks].reshape(4, num_ranks)
    sent_q, visiting_q, sent_k, visiting_k = counts.sum(1).tolist()
    own_q, own_k = counts[0, rank].item(), counts[2, rank].item()
    rows = {
        "visiting queries": visiting_q,
        "visiting keys": visiting_k,
        "returned queries": sent_q - own_q,
        "returned keys": sent_k - own_k,
    }
    return layout[NUM_HOME_ROWS].item(), rows
