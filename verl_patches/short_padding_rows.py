"""Shortens the rows by which upstream fills a batch up to a size that divides.

verl 0.9.1 gives each of them 128 tokens, which every pass computes as it computes any row's. Trees may need nearly as
many padding rows as they have rows. This can go when a config key sets the length.
"""

from verl.trainer.ppo import padding_utils

# one token of a prompt and one of a response, as a sequence has at least
PADDING_ROW_TOKENS = 2


def shorten_padding_rows() -> None:
    """Set the length of the padding rows that this process makes from now on."""
    padding_utils.SYNTHETIC_PADDING_SEQ_LEN = PADDING_ROW_TOKENS
