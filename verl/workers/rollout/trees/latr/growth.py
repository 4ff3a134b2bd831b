"""Growing a lookahead tree on an engine, in chunks.

Greedy growth is deterministic, so a row's future does not depend on the other rows: the engine is asked for a chunk of
each row's greedy continuation with the top candidates, and the chunk's steps are replayed in time order. Newly born
rows ask for the rest of the chunk; at its end all rows ask for the next one side by side. The tree is that of the
step-by-step algorithm, whatever the chunk size; what is lost are the unread tokens of rows that are pruned.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache

from stop_words import get_stop_words

from verl.workers.rollout.rollout_engine import Generation, RolloutEngine, gather_or_cancel
from verl.workers.rollout.trajectory_tree import TrajectoryTree, tree_of_rows
from verl.workers.rollout.trees.latr.config import KTConfig
from verl.workers.rollout.trees.latr.lookahead import Choice, LookaheadTree, Record, Row
from verl.workers.rollout.trees.latr.schedule import mix_ratio, tree_branches


@dataclass(frozen=True)
class Sampling:
    """Ordinary sampling, beside the tree and after it."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


@cache
def english_stop_words() -> frozenset[str]:
    return frozenset(word for word in get_stop_words("en") if word.isalpha())


class TreeGrower:
    """Grows one prompt's tree; `requested_tokens` counts what the engine generated for it."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompt_ids: Sequence[int],
        tree: LookaheadTree,
        sampling: Sampling,
        seed: int,
        request_id: str | None = None,
    ):
        self.engine, self.prompt_ids, self.tree, self.sampling = engine, list(prompt_ids), tree, sampling
        self.random, self.request_id = random.Random(seed), request_id
        self.ahead: dict[int, deque[Choice]] = {}
        self.ahead_sampled: dict[int, bool] = {}
        self.requested_tokens = 0

    async def grow(self) -> None:
        """Until the tree is left."""
        tree = self.tree
        while not tree.left:
            self._forget_stale_chunks()
            dry = [row for row in tree.rows if not row.finished and not self.ahead.get(row.number)]
            await gather_or_cancel(*(self._look_ahead(row) for row in dry))
            tree.advance([None if row.finished else self.ahead[row.number].popleft() for row in tree.rows])

    def _samples_now(self) -> bool:
        tree = self.tree
        mode = tree.config.sample_nk
        return mode == "always" or (mode == "full" and len(tree.rows) == tree.k)

    def _forget_stale_chunks(self) -> None:
        """A sampled chunk ends where its row took another token; a chunk made in the other mode is of no use."""
        sampled_now = self._samples_now()
        for row in self.tree.rows:
            if self.ahead.get(row.number) and self.ahead_sampled[row.number] != sampled_now:
                self.ahead[row.number].clear()

    async def _look_ahead(self, row: Row) -> None:
        tree, config = self.tree, self.tree.config
        last_step = tree.max_new_tokens if config.force_return_step == -1 else config.force_return_step
        # chunks end at multiples of chunk_size: all rows run dry at once and ask for the next one side by side
        to_chunk_end = config.chunk_size - tree.step % config.chunk_size
        n_tokens = min(to_chunk_end, min(last_step, tree.max_new_tokens) - tree.step)
        sampled = self._samples_now()
        if sampled:  # one token at a time: the next one depends on whether the row branches
            n_tokens = 1
        chunk = await self.engine.generate(
            self.prompt_ids + row.tokens,
            max_tokens=n_tokens,
            stop_token_ids=sorted(tree.eos),
            temperature=self.sampling.temperature if sampled else 0,
            top_p=self.sampling.top_p if sampled else 1.0,
            top_k=self.sampling.top_k if sampled else -1,
            seed=self.random.getrandbits(31) if sampled else None,
            n_candidates=config.max_n_branch_per_token,
            request_id=self.request_id,
        )
        if not chunk.token_ids:
            raise RuntimeError(f"the engine returned no token after {len(self.prompt_ids) + len(row.tokens)}")
        self.requested_tokens += len(chunk.token_ids)
        self.ahead[row.number] = deque(
            Choice(candidates, (token, log_prob) if sampled else None)
            for token, log_prob, candidates in zip(chunk.token_ids, chunk.log_probs, chunk.candidates, strict=True)
        )
        self.ahead_sampled[row.number] = sampled


async def latr_group(
    engine: RolloutEngine,
    prompt_ids: Sequence[int],
    n: int,
    config: KTConfig,
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    text_of: Callable[[int], str],
    training_step: int = 0,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    request_id: str | None = None,
) -> TrajectoryTree:
    """n trajectories of one prompt: the tree's branches first, then ordinary samples.

    Args:
        n: responses; `mix_ratio_schedule` at `training_step` says how many come from the tree.
        max_new_tokens: of a response.
        text_of: a token's text, for the stop-word (English) and math-symbol rules.

    Returns:
        the tree; `leaves` are the n trajectories, what was pruned stays in `segments` without a leaf. `metrics` holds
        the paper's ratios and how many tokens were generated and are of use.
    """
    seeds = random.Random(seed)
    k = tree_branches(n, mix_ratio(config.mix_ratio_schedule, training_step))
    stop_token_ids = sorted(set(eos_token_ids))

    async def finish(tokens: list[int], log_probs: list[float], own_seed: int) -> Generation:
        """Ordinary sampling from here to the end; the whole response."""
        room = max_new_tokens - len(tokens)
        if room < 1 or (tokens and tokens[-1] in stop_token_ids):
            return Generation(tokens, log_probs)
        more = await engine.generate(
            [*prompt_ids, *tokens],
            max_tokens=room,
            stop_token_ids=stop_token_ids,
            seed=own_seed,
            request_id=request_id,
            **asdict(sampling),
        )
        return Generation(tokens + more.token_ids, log_probs + more.log_probs)

    own_seeds = [seeds.getrandbits(31) for _ in range(n)]
    lookahead_seed, grower_seed = seeds.getrandbits(31), seeds.getrandbits(31)

    async def grow_and_finish() -> tuple[LookaheadTree, TreeGrower, list[Row], list[Generation]]:
        lookahead = LookaheadTree(
            k, config, max_new_tokens, stop_token_ids, text_of, english_stop_words(), lookahead_seed
        )
        grower = TreeGrower(engine, prompt_ids, lookahead, sampling, grower_seed, request_id)
        await grower.grow()
        rows = list(lookahead.rows)
        if config.fill_return_sequences:
            rows += [rows[0]] * (k - len(rows))
        ends = [finish(row.tokens, row.log_probs, own_seed) for row, own_seed in zip(rows, own_seeds, strict=False)]
        return lookahead, grower, rows, await gather_or_cancel(*ends)

    beside = [finish([], [], own_seed) for own_seed in own_seeds[k:]]
    if k:
        (lookahead, grower, rows, branches), *others = await gather_or_cancel(grow_and_finish(), *beside)
        dropped = lookahead.dropped
        metrics = lookahead.metrics() | {"tree_tokens_generated": float(grower.requested_tokens)}
    else:
        others = await gather_or_cancel(*beside)
        dropped, branches, metrics = [], [], {}
    responses = [*branches, *others]
    everything = [(one.token_ids, one.log_probs) for one in responses]
    everything += [(row.tokens, row.log_probs) for row in dropped]
    tree = tree_of_rows(
        prompt_ids, [tokens for tokens, _ in everything], [p for _, p in everything], range(len(responses))
    )
    if k:
        numbers = [row.number for row in rows] + [None] * (n - k) + [row.number for row in dropped]
        annotate(tree, numbers, lookahead.record)
    tree.metrics = metrics | {"tree_share": k / n}
    return tree


def annotate(tree: TrajectoryTree, numbers: Sequence[int | None], record: Record) -> None:
    """Write to the segments' `info` what happened there, for the viewer; `info["rows"]` goes.

    The last segment of a pruned branch gets `pruned` (why) and `pruned_step`; the segment where a candidate found no
    free branch gets it in `suppressed`: {"offset": of the token it was an alternative to, "token", "prob"}.

    Args:
        tree: of `tree_of_rows`.
        numbers: the lookahead tree's number of each of its rows; None for one that was not in the tree.
        record: the lookahead tree's.
    """
    paths: dict[int | None, list[int]] = {}
    row_of = {number: row for row, number in reversed(list(enumerate(numbers))) if number is not None}
    for number, row in row_of.items():
        paths[number] = [i for i, segment in enumerate(tree.segments) if row in segment.info["rows"]]
    returned = {i for leaf in tree.leaves for i in tree.path(leaf)}
    for event in record.pruned:
        last = paths[event["row"]][-1]
        if last not in returned:  # ordinary sampling may have written the same again
            tree.segments[last].info |= {"pruned": event["reason"], "pruned_step": event["step"]}
    for event in record.suppressed:
        start = 0
        for i in paths[event["row"]]:
            segment = tree.segments[i]
            if start <= event["step"] < start + len(segment.token_ids):
                candidate = {"offset": event["step"] - start, "token": event["token"], "prob": event["p"]}
                segment.info.setdefault("suppressed", []).append(candidate)
                break
            start += len(segment.token_ids)
    for segment in tree.segments:
        segment.info.pop("rows")
