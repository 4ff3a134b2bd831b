"""LATR as a tree policy, which grows a lookahead tree in chunks of tokens.

Greedy growth is deterministic, so a row's future does not depend on other rows. The engine therefore generates as much
of a row's greedy continuation, with the top candidates, as will probably be read; the steps are replayed in time order.
While one row waits for tokens, requests are sent as well for rows that will soon run out of them and for branches that
will open. The tree equals that of the step-by-step algorithm; the only cost are generated tokens that are never read.

With tools, a row that closes a call waits for the result before its next step. Results take no steps, and only tokens
of the model are compared between branches. A row that may not get a result ends.
"""

import random
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace

from omegaconf import OmegaConf
from stop_words import get_stop_words

import recipe.latr.over_generation  # noqa: F401  # registers tree=over_generation
from recipe.latr.keys import SECTION, KTConfig, Tightened, mix_ratio, tightened
from recipe.latr.lookahead import Choice, LookaheadTree, Row
from verl.utils.parts import register_tree
from verl.workers.config.keys import ROLLOUT, check_log_probs
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.environment import Ends
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import Segment
from verl.workers.rollout.tree_builder import BranchPolicy, Path, TreeBuilder, token_text

# English stop words of letters alone, in lower case
STOP_WORDS = frozenset(word for word in get_stop_words("en") if word.isalpha())


def check_correction(config) -> None:
    """Check that rollout correction compares LATR's tokens at temperature 1, if it is on."""
    temperature = config.actor_rollout_ref.rollout.temperature
    for name in ("rollout_is", "rollout_rs", "bypass_mode"):
        key = f"algorithm.rollout_correction.{name}"
        if (value := OmegaConf.select(config, key)) and temperature != 1:
            raise ValueError(
                f"{key}={value} with tree=latr and {ROLLOUT}.temperature={temperature}: the "
                "tree's tokens are the most likely ones, whose probabilities vLLM gives at temperature 1, and they "
                "would be compared with the trainer's at another: set the temperature to 1, or leave this out"
            )


@register_tree(
    "kt",
    "LATR under its authors' name, rollout.name=kt; rollout.name=vllm samples the ordinary way",
    extends="latr",
    values={f"{ROLLOUT}.tree": None, f"{ROLLOUT}.name": "kt"},
    alias=True,
)
@register_tree(
    "latr",
    "LATR (arXiv 2510.24302): a lookahead tree for each prompt, with the paper's thresholds for Countdown",
    keys=KTConfig,
    section=SECTION,
    omit_defaults=("mix_ratio_schedule",),
    smallest={"prob_filter_abs_thres": 0.0, "prob_filter_rel_thres": 1.0, "rollout_filter_steps": [3]},
    rollout_names=("kt",),
    checks=check_correction,
)
class Policy(BranchPolicy):
    """The policy of `tree=latr`: the first of the n trajectories are the tree's branches, the others are sampled.

    `text_of` returns a token's text, for the stop-word (English) and math-symbol rules; `training_step` sets the tree's
    share (`mix_ratio_schedule`).
    """

    def __init__(self, config: KTConfig, text_of: Callable[[int], str] = str, training_step: int = 0):
        self.config, self.text_of, self.training_step = config, text_of, training_step

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        rollout, kt = config.actor_rollout_ref.rollout, cls.part.read(config)
        plain = rollout.temperature == 1 and rollout.top_p == 1 and rollout.top_k in (-1, 0)
        if kt.sample_nk != "none" and not plain:
            raise ValueError(
                f"{SECTION}.sample_nk={kt.sample_nk} needs temperature=1, top_p=1, top_k=-1: the server reports the "
                "most likely tokens after them, and branches open by raw probabilities"
            )
        check_log_probs(rollout, f"{SECTION}.max_n_branch_per_token", kt.max_n_branch_per_token)
        return cls(kt, token_text(tokenizer))

    def for_task(self, task: PromptTask) -> "Policy":
        config = tightened(self.config, (task.settings.tree_record(Tightened) or Tightened()).steps)
        return Policy(config, self.text_of, task.step)

    async def grow(self, builder: TreeBuilder, n: int) -> None:
        k, seeds = self.branches(n), random.Random(builder.seed)
        own_seeds = [seeds.getrandbits(31) for _ in range(n)]
        lookahead_seed, grower_seed = seeds.getrandbits(31), seeds.getrandbits(31)

        async def branches() -> tuple[TreeGrower, list[Row], list[list[Segment]]]:
            lookahead = LookaheadTree(
                k, self.config, builder.max_tokens, builder.final_tokens, self.text_of, STOP_WORDS, lookahead_seed
            )
            grower = TreeGrower(builder, lookahead, grower_seed)
            await grower.grow()
            rows = list(lookahead.rows)
            if self.config.fill_return_sequences:
                rows += [rows[0]] * (k - len(rows))
            ends = [grower.finish(row, seed) for row, seed in zip(rows, own_seeds, strict=False)]
            return grower, rows, await gather_or_cancel(*ends)

        tree = builder.tree
        samples = [builder.finish(Path(), seed) for seed in own_seeds[k:]]
        if k:
            (grower, rows, ends), *others = await gather_or_cancel(branches(), *samples)
            leaf_of = grower.place()
            tree.leaves = [tree.insert(leaf_of[row.number], end) for row, end in zip(rows, ends, strict=True)]
            tree.metrics = grower.tree.metrics() | {"tree_tokens_generated": float(grower.requested_tokens)}
        else:
            others = await gather_or_cancel(*samples)
        tree.leaves += [tree.insert(None, segments) for segments in others]
        tree.metrics["tree_share"] = k / n
        if k:
            grower.annotate(leaf_of)

    def branches(self, n: int) -> int:
        """Return how many of n trajectories come from the tree; Python's rounding, as in the published code."""
        return round(n * mix_ratio(self.config.mix_ratio_schedule, self.training_step))


class TreeGrower:
    """Grows one prompt's lookahead tree; `requested_tokens` is the number of tokens the engine generated for it."""

    def __init__(self, builder: TreeBuilder, tree: LookaheadTree, seed: int):
        self.builder, self.tree, self.random = builder, tree, random.Random(seed)
        self.ahead: dict[int, deque[Choice]] = {0: deque()}
        self.unborn: dict[tuple[int, int, int], deque[Choice]] = {}  # (parent, birth step, token)
        # row -> number of the model's tokens before a result -> the tool's result; copies the parent's up to the birth
        self.results: dict[int, dict[int, Segment]] = {0: {}}
        self.unanswered: set[int] = set()  # rows that end with a call without a result
        self.requested_tokens = 0

    async def grow(self) -> None:
        """Grow the tree until it is left."""
        tree = self.tree
        while not tree.left:
            self._forget_stale_chunks()
            live = [row for row in tree.rows if not row.finished]
            if dry := [row for row in live if not self._choices_of(row)]:
                await gather_or_cancel(*(self._look_ahead(row) for row in dry), *self._look_further(live))
            if all(row.finished for row in tree.rows):
                break
            tree.advance([None if row.finished else self.ahead[row.number].popleft() for row in tree.rows])
        # Rows may be returned several times, so their pending calls are answered here, once.
        await gather_or_cancel(*(self._after_reply(row) for row in tree.rows if not row.finished))

    async def finish(self, row: Row, seed: int) -> list[Segment]:
        """Sample the rest of a row and return its segments; none if the row ended with a call without a result."""
        return [] if row.number in self.unanswered else await self.builder.finish(self.path(row), seed)

    def path(self, row: Row) -> Path:
        """Return the path of a row: its tokens and the tools' results between them."""
        path, start = Path(), 0
        for at, result in self._results_of(row).items():
            path, start = path.then(Segment(None, row.tokens[start:at])).then(result), at
        return path.then(Segment(None, row.tokens[start:]))

    def _results_of(self, row: Row) -> dict[int, Segment]:
        """Return a row's results in order; a new branch gets those that its parent had at the branch's birth."""
        if row.number not in self.results:
            parent_results = self.results[row.parent].items()
            self.results[row.number] = {at: result for at, result in parent_results if at <= row.birth_step}
        return self.results[row.number]

    def _forget_stale_chunks(self) -> None:
        """Clear chunks of choices that were generated in the other mode, sampled or greedy."""
        sampled = self.tree.samples()
        for row in self.tree.rows:
            if (ahead := self._choices_of(row)) and (ahead[0].sampled is not None) != sampled:
                ahead.clear()

    def _choices_of(self, row: Row) -> deque[Choice]:
        """Return the available choices of a row's next steps; for a new row, those requested before its birth."""
        if row.number not in self.ahead:
            self._results_of(row)
            self.ahead[row.number] = self.unborn.pop((row.parent, row.birth_step, row.tokens[-1]), deque())
        return self.ahead[row.number]

    async def _look_ahead(self, row: Row) -> None:
        sampled = self.tree.samples()
        seed = self.random.getrandbits(31) if sampled else None
        if (path := await self._after_reply(row)) is None:
            row.finished = True
            return
        length, birth_step = len(row.tokens), None if row.parent is None else row.birth_step
        # Sampling goes one token at a time, because the next token depends on whether the row branches.
        n_tokens = 1 if sampled else self._n_tokens(length, self.tree.needed_until(length, birth_step))
        self.ahead[row.number] += await self._choices(path, n_tokens, seed)

    def _look_further(self, rows: Sequence[Row]) -> list[Coroutine]:
        """Return further requests to run: for rows that soon run out of choices, and branches about to open."""
        tree, requests = self.tree, []
        if tree.samples():
            return []
        for row in rows:
            choices, length = self.ahead[row.number], len(row.tokens)
            end = tree.needed_until(length, None if row.parent is None else row.birth_step)
            if 0 < len(choices) < tree.config.chunk_size and length + len(choices) < end:
                requests.append(self._extend(choices, row, _first_tokens(choices), end))
        for parent, offset, token in tree.births_ahead(self.ahead):
            step = tree.step + offset
            if (parent.number, step, token) not in self.unborn:
                choices = self.unborn[parent.number, step, token] = deque()
                tokens = [*_first_tokens(self.ahead[parent.number])[:offset], token]
                requests.append(self._extend(choices, parent, tokens, tree.needed_until(step + 1, step)))
        return requests

    async def _extend(self, choices: deque[Choice], row: Row, tokens: list[int], end: int) -> None:
        """Add the choices that follow the row and `tokens`; none if the model's turn ends there."""
        path = self.path(row).then(Segment(None, tokens))
        n_tokens = self._n_tokens(len(row.tokens) + len(tokens), end)
        if n_tokens > 0 and self.builder.tokens_left(path) > 0 and self.builder.ends(path) is Ends.NO:
            choices += await self._choices(path, n_tokens, None)

    def _n_tokens(self, length: int, end: int) -> int:
        return min(max(end - length, self.tree.config.chunk_size), self.tree.last_step() - length)

    async def _choices(self, path: Path, n_tokens: int, seed: int | None) -> list[Choice]:
        """Request the choices of the next tokens; greedy without a seed, else sampled."""
        n_top_logprobs = self.tree.config.max_n_branch_per_token
        chunk = await self.builder.generate(
            path, seed=seed, max_tokens=n_tokens, greedy=seed is None, n_top_logprobs=n_top_logprobs
        )
        self.requested_tokens += len(chunk.token_ids)
        return [
            Choice(top_logprobs, None if seed is None else (token, log_prob))
            for token, log_prob, top_logprobs in zip(chunk.token_ids, chunk.log_probs, chunk.top_logprobs, strict=True)
        ]

    async def _after_reply(self, row: Row) -> Path | None:
        """Return the row's path, with the result of a call at its end; None if it can have no more tokens."""
        path = self.path(row)
        if self.builder.ends(path) is Ends.TURN:
            then = await self.builder.settle(path)
            if then.ended is not None:
                self.unanswered.add(row.number)
                return None
            (self._results_of(row)[len(row.tokens)],), path = then.segments, then.path
        return path if self.builder.tokens_left(path) > 0 else None

    # ---- the rows as segments ----

    def place(self) -> dict[int, int | None]:
        """Write all rows, also dropped ones, into the tree; return row number -> index of its last segment."""
        rows = sorted([*self.tree.rows, *self.tree.dropped], key=lambda row: row.number)
        births = defaultdict(set)
        for row in rows:
            births[row.parent].add(row.birth_step)
        ends: dict[int | None, dict[int, int | None]] = {None: {0: None}}  # row -> its tokens -> segment ending there
        for row in rows:
            start, tree = row.birth_step, self.builder.tree
            at = ends[row.parent][start]
            ends[row.number] = {start: at}
            results = self._results_of(row)
            for cut in sorted(births[row.number] | set(results) | {len(row.tokens)}):
                if cut > start:
                    at = tree.add(Segment(at, row.tokens[start:cut], row.log_probs[start:cut]))
                    if cut in results:
                        at = tree.add(replace(results[cut], parent=at))
                    ends[row.number][cut], start = at, cut
        return {row.number: ends[row.number][len(row.tokens)] for row in rows}

    def annotate(self, leaf_of: dict[int, int | None]) -> None:
        """Note at the last segment of each pruned branch why it was pruned, for the viewer."""
        tree = self.builder.tree
        returned = {i for leaf in tree.leaves for i in tree.path(leaf)}
        for row in self.tree.dropped:
            last = leaf_of[row.number]
            if last not in returned:  # a returned sample may contain the same tokens
                tree.segments[last].info.notes["pruned"] = row.pruned


def _first_tokens(choices: Iterable[Choice]) -> list[int]:
    return [choice.top_logprobs[0][0] for choice in choices]
