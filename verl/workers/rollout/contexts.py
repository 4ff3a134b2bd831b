"""Contexts of a rollout: what the model reads before a turn, where that is not everything before the turn.

A rollout stays one row of the batch, whose response holds every sampled token once, in order. A context replaces the
row's tokens before some turn, for that turn and the following ones:

    row        prompt  turn 1  answer 1  turn 2  answer 2  turn 3        read by credit, losses, metrics, rewards
    context                              [5, 8, 2, 7]                    from turn 2 on
    sequences  prompt  turn 1  answer 1                                  read by the model
               5 8 2 7  turn 2  answer 2  turn 3

So whatever counts rows counts rollouts, and each token is trained once, after the context in which it was sampled. Only
the engine's forward knows sequences (`sequences_of_row`); what they begin with alike is computed once.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.workers.config.keys import STRICT

# column of the rows with `contexts_cell`; only in runs whose rollouts may have contexts
CONTEXTS = "contexts"
THINK, END_OF_THINKING = "<think>", "</think>"


class Context(NamedTuple):
    """A context of a row."""

    start: int  # number of tokens of the row before the turn that reads the context
    ids: Sequence[int] | np.ndarray | None  # the context's tokens; None: from here on nothing is trained


@dataclass(frozen=True, config=STRICT)
class ContextKeys:
    """Keys under `environment` that change what the model reads before a turn (recipe/common/config/environment)."""

    thinking: Literal["kept", "dropped"] = "kept"
    max_context: int | None = Field(default=None, ge=1)
    max_rows: int = Field(default=16, ge=1)

    @property
    def change_contexts(self) -> bool:
        return self.thinking == "dropped" or self.max_context is not None


class ContextRule:
    """The part of earlier turns that a turn reads by `ContextKeys`."""

    def __init__(self, keys: ContextKeys, tokenizer):
        self.keys, self.tokenizer = keys, tokenizer
        self._without_thinking = lru_cache(maxsize=4096)(self._find_thinking)  # a turn is read again after each answer

    def after(self, prompt: Sequence[int], tokens: Sequence[int], answers: Sequence[tuple[int, int]]) -> list[int]:
        """Return the context of the turn that follows the last answer. `answers` are the beginning and end of each of
        the environment's answers in `tokens`, the response so far."""
        starts = [0, *(end for _, end in answers)]
        turns = [(tokens[start:begin], tokens[begin:end]) for start, (begin, end) in zip(starts, answers, strict=False)]
        if (most := self.keys.max_context) is not None:
            lengths = [len(self.with_turn([], turn)) + len(answer) for turn, answer in turns]
            left = len(prompt) + sum(lengths)
            while left > most and len(turns) > 1:
                left -= lengths[-len(turns)]
                turns.pop(0)
        context = list(prompt)
        for turn, answer in turns:
            context = self.with_turn(context, turn)
            context += answer
        return context

    def with_turn(self, context: list[int], turn: Sequence[int]) -> list[int]:
        """Return a context extended by a turn, without the turn's thinking if it is dropped."""
        if self.keys.thinking == "kept":
            return [*context, *turn]
        kept, opens = self._without_thinking(tuple(turn))
        if not opens:  # the prompt's template has written the opening tag
            decode = self.tokenizer.decode
            n = next((n for n in range(1, 9) if decode(context[-n:]).strip() == THINK), 0)
            context = context[: len(context) - n]
        return [*context, *kept]

    def _find_thinking(self, turn: tuple[int, ...]) -> tuple[list[int], bool]:
        """Return a turn's tokens without its thinking, and whether it writes the opening tag, or does not think."""
        decode = self.tokenizer.decode
        if not (n_ends := decode(list(turn)).count(END_OF_THINKING)):
            return list(turn), True
        # the shortest beginning that holds all the turn's thinking, and blank lines after it
        end = bisect_left(range(len(turn) + 1), n_ends, key=lambda n: decode(list(turn[:n])).count(END_OF_THINKING))
        thinking, _, rest = decode(list(turn[:end])).rpartition(END_OF_THINKING)
        rest = rest.lstrip()  # a token may hold more than the tag
        while end < len(turn) and not rest and not decode([turn[end]]).strip():
            end += 1
        first = self.tokenizer.encode(rest, add_special_tokens=False) if rest else []
        return [*first, *turn[end:]], THINK in thinking


def contexts_cell(contexts: Sequence[Context]) -> np.ndarray:
    """Return contexts as a cell: their number, start and length of each (-1 for None), and the ids of all."""
    ends = [number for start, ids in contexts for number in (start, -1 if ids is None else len(ids))]
    all_ids = [token for _, ids in contexts for token in ids or ()]
    return np.array([len(contexts), *ends, *all_ids], dtype=np.int64)


def contexts_of_cell(cell: np.ndarray) -> list[Context]:
    """Return the contexts of a cell; the inverse of `contexts_cell`."""
    n = int(cell[0])
    contexts, at = [], 1 + 2 * n
    for start, length in cell[1:at].reshape(n, 2).tolist():
        contexts.append(Context(start, None if length < 0 else cell[at : at + length]))
        at += max(length, 0)
    return contexts


class Sequences(NamedTuple):
    """The sequences that the model reads for a row."""

    tokens: list[np.ndarray]  # token ids of each sequence
    begins: list[int]  # number of each sequence's first tokens that are a context, and not the row's
    n_untrained: int = 0  # number of the row's last tokens that no sequence holds

    @property
    def n_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def of_row(self, values: Sequence[np.ndarray], fill: int) -> np.ndarray:
        """Return a value for each token of the row, given the values of each sequence's tokens."""
        parts = [sequence_values[begin:] for sequence_values, begin in zip(values, self.begins, strict=True)]
        return np.concatenate([*parts, np.full(self.n_untrained, fill, dtype=np.int64)])


def sequences_of_row(row: np.ndarray, contexts: Iterable[Context] = ()) -> Sequences:
    """Return the sequences of a row's tokens, prompt and response."""
    starts, before = [0], [np.empty(0, dtype=np.int64)]
    n_trained = len(row)
    for start, ids in contexts:
        if ids is None:
            n_trained = start
            break
        starts.append(start)
        before.append(np.asarray(ids, dtype=np.int64))
    ends = [*starts[1:], n_trained]
    tokens = [np.concatenate([ids, row[s:e]]) for ids, s, e in zip(before, starts, ends, strict=True)]
    return Sequences(tokens, list(map(len, before)), len(row) - n_trained)


def trained_contexts(
    row: Sequence[int],
    contexts: Sequence[Context],
    max_rows: int,
    max_tokens: float,
    n_distinct: Callable[[list[np.ndarray]], int],
) -> list[Context]:
    """Return contexts of which only the first `max_rows` sequences are trained, and fewer if they hold more than
    `max_tokens` distinct tokens, which `n_distinct` counts."""
    array, n = np.asarray(row, dtype=np.int64), min(len(contexts), max_rows - 1)

    def first(n: int) -> list[Context]:
        return [*contexts[:n], *(Context(at.start, None) for at in contexts[n : n + 1])]

    while n and n_distinct(sequences_of_row(array, first(n)).tokens) > max_tokens:
        n -= 1
    return first(n)
