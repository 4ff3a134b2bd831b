"""Shortens the rows by which upstream fills a batch up to a size that divides.

verl 0.9.1 gives each of them 128 tokens, which every pass computes as it computes any row's. Trees may need nearly as
many padding rows as they have rows. This can go when a config key sets the length.
"""

from verl.trainer.ppo import padding_utils


def shorten_padding_rows() -> None:
    """Let the padding rows that this process makes from now on have a token of a prompt and one of a response."""
    padding_utils.SYNTHETIC_PADDING_SEQ_LEN = 2
