"""Shortens the padding rows that upstream adds until the number of rows is divisible.

verl 0.9.1 gives each padding row 128 tokens, and every pass computes them like those of other rows. A batch of trees
may need nearly as many padding rows as it has rows. This can go when a config key sets the length.
"""

from verl.trainer.ppo import padding_utils


def shorten_padding_rows() -> None:
    """Set the length of padding rows in this process to 2: one token of a prompt and one of a response."""
    padding_utils.SYNTHETIC_PADDING_SEQ_LEN = 2
