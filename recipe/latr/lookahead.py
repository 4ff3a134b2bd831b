"""One prompt's lookahead tree (LATR, arXiv 2510.24302), step by step: branching, capacity, lookahead pruning, exit.

It needs no engine: `LookaheadTree.advance` gets the candidates of each live row for one step, and makes the step:

    1. every unfinished row has candidates; a finished row keeps its slot
    2. further candidates that pass the filters may open branches, in (rank, row) order up to the capacity k
    3. new branches are born, in (row, rank) order; then every old row takes its first candidate
    4. branches born r - 1 steps ago, r in rollout_filter_steps, are compared with their parents; those too similar
       are dropped, with their descendants
    5. rows that took an end-of-sequence token are finished
    6. the exit rule decides whether the tree is left

Example, k = 2, prob_filter_abs_thres 0.25: row 0 reads "3"; its candidates are "+" (0.5) and "-" (0.4). Row 1 is born
with "-", parent 0; row 0 takes "+". Twenty steps later both have written nearly the same: row 1 is dropped.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rapidfuzz.distance import LCSseq, Levenshtein

from recipe.latr.keys import KTConfig

TokenLogprob = tuple[int, float]  # token, log-probability
MATH_SYMBOLS = frozenset("+-*/\\<>=()[]{}_^&%$0123456789")
PUNCTUATION = frozenset(".,;:!?\"'")


def edit_distance_ratio(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the Levenshtein distance / length; 0 for equal sequences."""
    return Levenshtein.distance(a, b) / len(a)


def rouge_l(a: Sequence[int], b: Sequence[int]) -> float:
    """Return ROUGE-L F1: longest common subsequence / length, as both are equally long."""
    return LCSseq.similarity(a, b) / len(a)


def suffix_match(a: Sequence[int], b: Sequence[int]) -> float:
    """Return the length of the longest suffix of one that occurs anywhere in the other, / length: two branches may
    write the same sentence, one a few tokens later."""
    return max(_longest_suffix_inside(a, b), _longest_suffix_inside(b, a)) / len(a)


def _longest_suffix_inside(a: Sequence[int], b: Sequence[int]) -> int:
    # Each token becomes a character, so that Python's own substring search can be used.
    letter = {token: chr(i) for i, token in enumerate({*a, *b})}
    text, inside = ("".join(letter[token] for token in tokens) for tokens in (a, b))
    longest = 0
    while longest < len(text) and text[-longest - 1 :] in inside:
        longest += 1
    return longest


@dataclass
class Choice:
    """The engine's output for a row's next token: candidates, most likely first, and a sampled token if requested."""

    top_logprobs: list[TokenLogprob]
    sampled: TokenLogprob | None = None


@dataclass
class Row:
    """A branch of the tree.

    Args:
        number: number in order of birth, never reused; 0 for the root.
        birth_step: step of its birth, and number of the first tokens that it has from its parent.
        pruned: why it was dropped; empty for a live row.
    """

    number: int
    parent: int | None
    birth_step: int
    tokens: list[int]
    log_probs: list[float]
    finished: bool = False
    pruned: str = ""

    @property
    def cumulative_log_prob(self) -> float:
        """Return the log-probability, in nats, of the row's tokens since its birth, as in the published filter."""
        return sum(self.log_probs[self.birth_step :])


@dataclass
class Record:
    """The events of a tree's growth, for metrics and tests that compare trees. `suppressed` candidates passed the
    filters while all branches were in use; `passed` counts them too."""

    births: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # step, row, parent, rank, token
    pruned: list[tuple[int, int]] = field(default_factory=list)  # step, row
    suppressed: list[tuple[int, int, int]] = field(default_factory=list)  # step, row, rank
    compared: int = 0
    alike: int = 0  # number of the compared that were dropped
    passed: int = 0


class LookaheadTree:
    """A lookahead tree of one prompt: `rows` are the live rows in order of birth, `dropped` the pruned ones."""

    def __init__(
        self,
        k: int,
        config: KTConfig,
        max_new_tokens: int,
        eos_token_ids: Sequence[int],
        text_of: Callable[[int], str] = str,
        stop_words: frozenset[str] = frozenset(),
        seed: int = 0,
    ):
        self.k, self.config, self.max_new_tokens = k, config, max_new_tokens
        self.eos, self.text_of, self.stop_words = frozenset(eos_token_ids), text_of, stop_words
        self.random = random.Random(seed)
        self.rows = [Row(0, None, 0, [], [])]
        self.dropped: list[Row] = []
        self.record = Record()
        self.step = 0
        self.left = max_new_tokens < 1

    # ---- one step ----

    def advance(self, choices: Sequence[Choice | None]) -> None:
        """Make one step. `choices[i]` belongs to `rows[i]`; None for a finished row."""
        born, only_first = self._choose(choices)
        samples = self.samples()
        births = [self._birth(*birth) for birth in born]
        for i, (row, choice) in enumerate(zip(self.rows, choices, strict=True)):
            if choice is not None:
                token, log_prob = choice.sampled if samples and i in only_first else choice.top_logprobs[0]
                row.tokens.append(token)
                row.log_probs.append(log_prob)
        self.rows += births
        self._prune()
        for row in self.rows:
            row.finished = row.finished or row.tokens[-1] in self.eos
        self.left = self._leaves()
        self.step += 1

    def samples(self) -> bool:
        """Return whether rows that do not branch take a sampled token in the next step (`sample_nk`)."""
        mode = self.config.sample_nk
        return mode == "always" or (mode == "full" and len(self.rows) == self.k)

    def _choose(self, choices: Sequence[Choice | None]) -> tuple[list[tuple[Row, int, TokenLogprob]], set[int]]:
        """Return the births of this step as (parent, rank, candidate), and the indices of the rows without a birth."""
        passing = [
            (rank, i)
            for i, choice in enumerate(choices)
            if choice is not None
            for rank in range(1, min(len(choice.top_logprobs), self.config.max_n_branch_per_token))
            if self._opens_branch(choice, rank)
        ]
        free_rows = self.k - len(self.rows)
        kept, suppressed = sorted(passing)[:free_rows], sorted(passing)[free_rows:]
        self.record.passed += len(passing)
        self.record.suppressed += [(self.step, self.rows[i].number, rank) for rank, i in suppressed]
        born = [
            (self.rows[i], rank, choices[i].top_logprobs[rank]) for i, rank in sorted((i, rank) for rank, i in kept)
        ]
        return born, set(range(len(choices))) - {i for _, i in kept}

    def _opens_branch(self, choice: Choice, rank: int) -> bool:
        config, (token, log_prob) = self.config, choice.top_logprobs[rank]
        if config.random_branching_ratio is not None:
            if self.random.random() >= config.random_branching_ratio:
                return False
        else:
            first, this = math.exp(choice.top_logprobs[0][1]), math.exp(log_prob)
            if config.prob_filter_abs_thres is not None and not this > config.prob_filter_abs_thres:
                return False
            if config.prob_filter_rel_thres is not None and not first - this < config.prob_filter_rel_thres:
                return False
        return not (config.stop_word_filter and self._is_stop_word(token))

    def _is_stop_word(self, token: int) -> bool:
        word = self.text_of(token).strip()
        return not word or word.lower() in self.stop_words or PUNCTUATION.issuperset(word)

    def _birth(self, parent: Row, rank: int, candidate: TokenLogprob) -> Row:
        token, log_prob = candidate
        number = len(self.record.births) + 1
        self.record.births.append((self.step, number, parent.number, rank, token))
        return Row(number, parent.number, self.step, [*parent.tokens, token], [*parent.log_probs, log_prob])

    # ---- pruning ----

    def _prune(self) -> None:
        by_number = {row.number: row for row in self.rows}
        compared = []
        for r in self.config.rollout_filter_steps:
            for row in self.rows:
                if row.parent is not None and row.birth_step == self.step + 1 - r:
                    own, parents = row.tokens[-r:], by_number[row.parent].tokens[-r:]
                    if self._comparable(row, by_number[row.parent], own, parents):
                        compared.append((row, own, parents))
        self.record.compared += len(compared)
        reasons: dict[int, str] = {}
        if self.config.random_pruning_ratio is not None:
            n = int(len(compared) * self.config.random_pruning_ratio)
            reasons = {row.number: "random" for row, _, _ in self.random.sample(compared, n)}
        else:
            for row, own, parents in compared:
                if reason := self._too_alike(own, parents):
                    reasons[row.number] = reason
        self.record.alike += len(reasons)
        for number in self._improbable():
            reasons.setdefault(number, "improbable")
        self._drop(reasons)

    def _comparable(self, row: Row, parent: Row, own: list[int], parents: list[int]) -> bool:
        if row.finished or parent.finished or not self.eos.isdisjoint(own) or not self.eos.isdisjoint(parents):
            return False
        return not (self.config.keep_math_symbols and self._is_math_symbol(parents[0]))

    def _is_math_symbol(self, token: int) -> bool:
        text = self.text_of(token).strip()
        return bool(text) and MATH_SYMBOLS.issuperset(text)

    def _too_alike(self, own: list[int], parents: list[int]) -> str | None:
        config = self.config
        if config.rollout_filter_edit_dist_thres is not None:
            if edit_distance_ratio(own, parents) < config.rollout_filter_edit_dist_thres:
                return "edit distance"
        if config.rollout_filter_suffix_match_thres is not None:
            if suffix_match(own, parents) > config.rollout_filter_suffix_match_thres:
                return "suffix match"
        if config.rollout_filter_rouge_l_thres is not None:
            if rouge_l(own, parents) > config.rollout_filter_rouge_l_thres:
                return "ROUGE-L"
        return None

    def _improbable(self) -> list[int]:
        """Return the numbers of the rows that the cumulative-probability filter drops at this step."""
        steps, threshold = self.step + 1, self.config.cumulative_prob_filter_thres
        if threshold is None or steps % self.config.cumulative_prob_filter_interval or len(self.rows) == self.k:
            return []
        best = max(row.cumulative_log_prob for row in self.rows)
        bound = math.log(threshold) * steps
        return [
            row.number
            for row in self.rows
            if row.parent is not None and self.eos.isdisjoint(row.tokens) and row.cumulative_log_prob - best < bound
        ]

    def _drop(self, reasons: dict[int, str]) -> None:
        """Drop rows and their descendants. A parent is always older, so one pass in order of birth finds them all."""
        kept = []
        for row in self.rows:
            if row.parent in reasons:
                reasons.setdefault(row.number, "parent dropped")
            if row.number in reasons:
                row.pruned = reasons[row.number]
                self.dropped.append(row)
                self.record.pruned.append((self.step, row.number))
            else:
                kept.append(row)
        self.rows = kept

    # ---- exit ----

    def _leaves(self) -> bool:
        """Return whether the tree is left, for good, after this step."""
        done = self.step + 1
        if all(row.finished for row in self.rows) or done >= self.last_step():
            return True
        if not self.config.return_on_full:
            return False
        last_lookahead = max(self.config.rollout_filter_steps)
        return self._is_full() and all(row.birth_step + last_lookahead < self.step for row in self.rows)

    def _is_full(self) -> bool:
        config = self.config
        share = config.return_nb_thres_init - config.return_nb_thres_decay * self.step / self.max_new_tokens
        return len(self.rows) >= round(self.k * share)

    # ---- what will be needed ----

    def last_step(self) -> int:
        """Return the number of steps after which the tree is left at the latest."""
        forced = self.config.force_return_step
        return self.max_new_tokens if forced == -1 else min(forced, self.max_new_tokens)

    def needed_until(self, length: int, birth_step: int | None) -> int:
        """Estimate the length, in tokens, that a row will reach in the tree; at most `last_step()`.

        The engine generates a row's tokens up to it in advance. It is the earliest step at which `return_on_full` can
        leave the tree or, while too few branches are in use for that, 1.5 times the row's length if that is more. If
        most compared branches have been dropped, it is the length of a young branch at its next comparison.
        """
        config, steps = self.config, self.config.rollout_filter_steps
        if self.step == 0:  # no branch has opened yet, so there is nothing to estimate from
            return min(config.chunk_size, self.last_step())
        if birth_step is not None and 2 * len(self.record.pruned) > self.record.compared:
            if comparisons := [birth_step + r for r in steps if birth_step + r > length]:
                return min(*comparisons, self.last_step())
        if not config.return_on_full:
            return self.last_step()
        if self._is_full():
            earliest_exit = max(row.birth_step for row in self.rows) + max(steps) + 2
        else:
            earliest_exit = max(self.step + max(steps) + 2, length * 3 // 2)
        return min(earliest_exit, self.last_step())

    def births_ahead(self, ahead: Mapping[int, Sequence[Choice]]) -> list[tuple[Row, int, int]]:
        """Predict the branches that will open in the next steps, from choices that the engine has generated in advance.

        Each is (parent, number of the parent's choices before the birth, token), in order of birth. They take at most
        half of the free branches, because rows without generated choices may take the others.
        """
        free = (self.k - len(self.rows) + 1) // 2
        if not free or self.config.random_branching_ratio is not None:
            return []
        births: list[tuple[int, int, int, int]] = []
        for position, row in enumerate(self.rows):
            passing = (
                (offset, rank, position, choice.top_logprobs[rank][0])
                for offset, choice in enumerate(ahead.get(row.number, ()))
                for rank in range(1, min(len(choice.top_logprobs), self.config.max_n_branch_per_token))
                if self._opens_branch(choice, rank)
            )
            births += islice(passing, free)
        return [(self.rows[position], offset, token) for offset, _, position, token in sorted(births)[:free]]

    # ---- numbers ----

    def metrics(self) -> dict[str, float]:
        """Return the paper's metrics and the tree's steps and branches; docs/metrics.md defines them."""
        tokens = sum(len(row.tokens) for row in self.rows)
        return {
            "suppress_ratio": len(self.record.suppressed) / (self.k * self.max_new_tokens) if self.step else 0.0,
            "empty_branch_ratio": 1 - len(self.rows) / self.k,
            "branching_ratio": self.record.passed / tokens if tokens else 0.0,
            "pruning_ratio": self.record.alike / self.record.compared if self.record.compared else 0.0,
            "saturation_length": float(max(row.birth_step for row in self.rows)),
            "tree_steps": float(self.step),
            "branches": float(len(self.rows)),
        }
