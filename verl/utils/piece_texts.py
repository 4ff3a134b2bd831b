"""Splits a path's text at the ends of its pieces, which may lie within a character."""

from collections.abc import Callable, Sequence


def piece_texts(decode: Callable[[Sequence[int]], str], pieces: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each piece of a path; joined they are the text of the whole path. (Only where SentencePiece's
    byte tokens spell no valid UTF-8 may the number of U+FFFD differ.)

    A character of several tokens, such as an emoji, belongs to the piece with its last token. A piece keeps the blank
    before its first word, which SentencePiece leaves out at the start of a text. The time is linear in the tokens.
    """
    texts: list[str] = []
    window: list[int] = []  # the last piece that ended with a whole character, and all after it
    shown = 0  # characters of the window's text that belong to earlier pieces
    for number, piece in enumerate(pieces, start=1):
        window += piece
        text = decode(window)
        whole = text if number == len(pieces) else text.rstrip("\ufffd")
        texts.append(whole[shown:])
        shown = max(shown, len(whole))
        if whole == text and piece:
            window, shown = list(piece), len(decode(piece))
    return texts
