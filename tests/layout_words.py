"""What tests read from a layout's words, of a plan of one round; see csrc/ops/layout_words.h."""

from torch import Tensor

STEP, NUM_RANKS, NUM_HOME_ROWS, NUM_ROUNDS = 2, 4, 5, 9
RANK, NUM_PARTS = 16, 19
HEADER_WORDS = 20
# The movement follows: the largest numbers of rows of any rank, then what is sent, and received.
MAX_WORDS, PLACE_WORDS = 4, 4


def backend_id(name: str) -> int:
    """Return the number that stands for a back end in layouts: see id_of in backend.h."""
    value = 0xCBF29CE484222325
    for byte in name.encode():
        value = (value ^ byte) * 0x100000001B3 % 2**64
    return value - 2**64 if value >= 2**63 else value


def num_rounds(layout: Tensor) -> int:
    return layout[NUM_ROUNDS].item()


def num_parts(layout: Tensor) -> int:
    return layout[NUM_PARTS].item()


def numbers_of_rows(layout: Tensor) -> tuple[int, dict[str, int]]:
    """Of a rank's own rows; of those that visit it, and of those that other ranks return to it."""
    words, rank = layout.tolist(), layout[RANK].item()
    position = HEADER_WORDS + MAX_WORDS

    def next_word() -> int:
        nonlocal position
        position += 1
        return words[position - 1]

    rows = dict.fromkeys(
        ("visiting queries", "visiting keys", "returned queries", "returned keys"), 0
    )
    for are_sent in (True, False):
        for _ in range(next_word()):
            peer, _ = next_word(), next_word()
            for kind in ("queries", "keys"):
                for _ in range(next_word()):
                    *_, num_rows = (next_word() for _ in range(PLACE_WORDS))
                    if peer == rank or not are_sent:
                        rows[f"visiting {kind}"] += num_rows
                    if peer != rank and are_sent:
                        rows[f"returned {kind}"] += num_rows
    return words[NUM_HOME_ROWS], rows
