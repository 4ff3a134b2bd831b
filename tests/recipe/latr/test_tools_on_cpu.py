"""LATR where an environment answers. What it means:

- Results take no steps: a row's step is a token of the model. They count in the length of the response.
- Branches are compared by what the model wrote, and no candidate of a result's tokens opens a branch.
- A branch has read the results that its parent had read when it was born; it shares them.
- A row that calls once too often, or has no tokens left for a result and one more, ends; it keeps its slot.
- The chunk size, and how fast engine and tools are, do not change the tree.

The oracle replays it a step at a time: plain lists, one token per row and step.
"""

import asyncio
import math
import random
from dataclasses import replace

import pytest

from recipe.latr.keys import KTConfig
from recipe.latr.lookahead import LookaheadTree, edit_distance_ratio, rouge_l, suffix_match
from recipe.latr.tree import Policy, TreeGrower
from tests.workers.rollout.toy_engine import CALL, EOS, Calls, HashEngine, Letters, answer_to
from verl.workers.rollout.engines.interface import Generation, RolloutEngine
from verl.workers.rollout.trajectory_tree import TOOL
from verl.workers.rollout.tree_builder import TreeBuilder, grow

SEEDS = range(60)


class Greedy(HashEngine):
    """Takes the most likely tokens also where it is to sample."""

    async def generate(self, request):
        return await super().generate(replace(request, temperature=0.0))


def text_of(token: int) -> str:
    """Tokens 0 to 3 are mathematical symbols."""
    return "+-*/"[token] if token < 4 else Letters().decode([token])


# ---- the reference ----


class SlowRow:
    def __init__(self, number, parent, birth, written, response, turn, calls):
        self.number, self.parent, self.birth, self.done = number, parent, birth, False
        self.written = written  # the model's tokens
        self.response = response  # (author, token)
        self.turn, self.calls = turn, calls  # the model's tokens since the last result; calls answered

    def child(self, number, birth):
        return SlowRow(number, self.number, birth, [*self.written], [*self.response], [*self.turn], self.calls)

    def write(self, token):
        self.written.append(token)
        self.response.append(("model", token))
        self.turn.append(token)

    def context(self, prompt):
        return [*prompt, *(token for _, token in self.response)]


def read_answer(row, max_tokens, call_limit, asked):
    """Append the answer to the call that the row ends with, if there is one; a row without an answer is done."""
    if row.turn and row.turn[-1] == CALL:
        if row.calls == call_limit:
            row.done = True
            return
        asked.append(tuple(row.response))
        answer = answer_to(row.turn, max_tokens - len(row.response) - 1)
        if not answer:
            row.done = True
            return
        row.response += [("tool", token) for token in answer]
        row.turn, row.calls = [], row.calls + 1
    if len(row.response) >= max_tokens:
        row.done = True


def too_alike(config, row, parent, r):
    a, b = row.written[-r:], parent.written[-r:]
    if row.done or parent.done or EOS in a or EOS in b or (config.keep_math_symbols and b[0] < 4):
        return False
    checks = (
        (config.rollout_filter_edit_dist_thres, lambda threshold: edit_distance_ratio(a, b) < threshold),
        (config.rollout_filter_suffix_match_thres, lambda threshold: suffix_match(a, b) > threshold),
        (config.rollout_filter_rouge_l_thres, lambda threshold: rouge_l(a, b) > threshold),
    )
    return any(check(threshold) for threshold, check in checks if threshold is not None)


def slow_tree(engine, prompt, k, config, max_tokens, call_limit):
    """Rows, births, prunings, suppressions, and the responses after which the environment was asked."""
    rows = [SlowRow(0, None, 0, [], [], [], 0)]
    births, prunings, suppressions, asked = [], [], [], []
    for t in range(max_tokens):
        for row in rows:
            if not row.done:
                read_answer(row, max_tokens, call_limit, asked)
        if all(row.done for row in rows):
            break
        top_logprobs, wanted = {}, []
        for position, row in enumerate(rows):
            wanted.append((0, position))
            if row.done:
                continue
            p = engine.probabilities(row.context(prompt))
            order = sorted(range(len(p)), key=lambda token, p=p: -p[token])[: config.max_n_branch_per_token]
            top_logprobs[position] = order
            for rank, token in enumerate(order):
                close = p[order[0]] - p[token] < config.prob_filter_rel_thres
                if rank and p[token] > config.prob_filter_abs_thres and close:
                    wanted.append((rank, position))
        wanted.sort()
        suppressions += [(t, rows[position].number, rank) for rank, position in wanted[k:]]
        new = []
        for position, rank in sorted((position, rank) for rank, position in wanted[:k] if rank):
            child = rows[position].child(len(births) + 1, t)
            child.write(top_logprobs[position][rank])
            births.append((t, child.number, child.parent, rank, child.written[-1]))
            new.append(child)
        for position, row in enumerate(rows):
            if not row.done:
                row.write(top_logprobs[position][0])
        rows += new
        by_number = {row.number: row for row in rows}
        bad = {
            row.number
            for r in config.rollout_filter_steps
            for row in rows
            if row.parent is not None and row.birth == t + 1 - r and too_alike(config, row, by_number[row.parent], r)
        }
        while more := {row.number for row in rows if row.parent in bad} - bad:
            bad |= more
        prunings += sorted((t, number) for number in bad)
        rows = [row for row in rows if row.number not in bad]
        for row in rows:
            row.done = row.done or row.written[-1] == EOS
        if all(row.done for row in rows) or (config.force_return_step != -1 and t + 1 >= config.force_return_step):
            break
        share = config.return_nb_thres_init - config.return_nb_thres_decay * t / max_tokens
        if config.return_on_full and len(rows) >= round(k * share):
            if all(row.birth + max(config.rollout_filter_steps) < t for row in rows):
                break
    return rows, births, prunings, suppressions, asked


def to_the_end(engine, prompt, row, max_tokens, call_limit):
    """The response of a row that goes on by the most likely tokens."""
    row = row.child(None, None) if not row.done else row
    while not row.done:
        read_answer(row, max_tokens, call_limit, [])
        if not row.done:
            p = engine.probabilities(row.context(prompt))
            row.write(max(range(len(p)), key=lambda token: p[token]))
            row.done = row.written[-1] == EOS
    return row.response


# ---- the comparison ----


def case_of(seed: int):
    generator = random.Random(seed)
    config = KTConfig(
        max_n_branch_per_token=generator.choice([2, 2, 3]),
        prob_filter_abs_thres=generator.choice([0.02, 0.05, 0.1]),
        prob_filter_rel_thres=generator.choice([0.2, 0.4, 0.8]),
        rollout_filter_steps=generator.choice([[3], [4, 8], [2, 5, 9]]),
        rollout_filter_edit_dist_thres=generator.choice([None, 0.4, 0.7]),
        rollout_filter_suffix_match_thres=generator.choice([None, 0.2, 0.5]),
        rollout_filter_rouge_l_thres=generator.choice([None, 0.5]),
        keep_math_symbols=generator.random() < 0.5,
        return_on_full=generator.random() < 0.6,
        return_nb_thres_decay=generator.choice([0.0, 0.05, 0.5]),
        force_return_step=generator.choice([-1, 11, 25]),
    )
    sizes = {"max_tokens": generator.choice([8, 30, 60]), "call_limit": generator.choice([0, 1, 2, 9])}
    k, prompt = generator.choice([2, 4, 8]), [generator.randrange(18) for _ in range(generator.randint(1, 5))]
    return Greedy(generator.choice([3.0, 6.0]), generator.choice([1, 2, 6])), prompt, k, config, sizes


def grower_of(engine, prompt, k, config, max_tokens, call_limit, environment=None):
    environment = environment or Calls(call_limit)
    builder = TreeBuilder(engine, prompt, max_tokens=max_tokens, stop_token_ids=[EOS], environment=environment)
    grower = TreeGrower(builder, LookaheadTree(k, config, max_tokens, [EOS], text_of), seed=0)
    asyncio.run(grower.grow())
    return grower


def responses_of(grower):
    """(author, token) of what each row has written and read."""
    leaf_of, tree = grower.place(), grower.builder.tree
    leaves = [leaf_of[row.number] for row in grower.tree.rows]
    paths = [[tree.segments[i] for i in tree.path(leaf)] for leaf in leaves]
    return [[(segment.author, token) for segment in path for token in segment.token_ids] for path in paths]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_tree_is_that_of_the_step_by_step_algorithm(seed):
    engine, prompt, k, config, sizes = case_of(seed)
    rows, births, prunings, suppressions, asked = slow_tree(engine, prompt, k, config, **sizes)
    for row in rows:  # answers that wait for copies of a row
        if not row.done:
            read_answer(row, sizes["max_tokens"], sizes["call_limit"], asked)
    for chunk_size in (1, 7, 64):
        grower = grower_of(engine, prompt, k, replace(config, chunk_size=chunk_size), **sizes)
        record, lookahead = grower.tree.record, grower.tree
        assert [(row.number, row.tokens) for row in lookahead.rows] == [(row.number, row.written) for row in rows]
        assert responses_of(grower) == [row.response for row in rows]
        assert record.births == births
        assert sorted(record.pruned) == sorted(prunings)
        assert record.suppressed == suppressions
        turns = [turn_before(response) for response in asked]
        assert sorted(grower.builder.environment.answered) == sorted(turns), "each row asks once"


def turn_before(response):
    last = max((i for i, (author, _) in enumerate(response) if author == "tool"), default=-1)
    return tuple(token for _, token in response[last + 1 :])


def test_the_random_trees_exercise_everything():
    births = prunings = suppressions = after_answers = full_lengths = refused = 0
    for seed in SEEDS:
        engine, prompt, k, config, sizes = case_of(seed)
        rows, b, p, s, asked = slow_tree(engine, prompt, k, config, **sizes)
        births, prunings, suppressions = births + len(b), prunings + len(p), suppressions + len(s)
        after_answers += sum(author == "tool" and row.birth > 0 for row in rows for author, _ in row.response)
        full_lengths += sum(len(row.response) == sizes["max_tokens"] for row in rows)
        refused += sum(bool(row.done and row.turn and row.turn[-1] == CALL) for row in rows)
    seen = births, prunings, suppressions, after_answers, full_lengths, refused
    assert min(seen) > 20, seen


def grown(engine, prompt, n, config, max_tokens, call_limit, environment=None):
    options = {"environment": environment or Calls(call_limit), "max_tokens": max_tokens, "stop_token_ids": [EOS]}
    return asyncio.run(grow(engine, prompt, n, Policy(config, text_of), seed=0, **options))


@pytest.mark.parametrize("seed", SEEDS)
def test_trajectories_go_on_with_answers_and_share_what_they_have_in_common(seed):
    engine, prompt, n, config, sizes = case_of(seed)
    config = replace(config, mix_ratio_schedule={0: 1.0 if seed % 2 else 0.5})
    k = round(n * config.mix_ratio_schedule[0])
    rows = slow_tree(engine, prompt, k, config, **sizes)[0]
    rows += [rows[0]] * (k - len(rows)) + [SlowRow(None, None, 0, [], [], [], 0)] * (n - k)
    expected = [to_the_end(engine, prompt, row, **sizes) for row in rows]
    tree = grown(engine, prompt, n, config, **sizes)
    assert tree.trajectories() == [[token for _, token in response] for response in expected]
    assert tree.response_masks() == [[int(author == "model") for author, _ in response] for response in expected]
    owner = {}
    for response, ids in zip(expected, tree.segment_ids(), strict=True):
        assert len(response) <= sizes["max_tokens"]
        for i, segment in enumerate(ids):
            prefix = tuple(response[: i + 1])
            where = segment, i - ids.index(segment)
            assert owner.setdefault(prefix, where) == where, "what is equal is shared"
    assert len(set(owner.values())) == len(owner), "and nothing else is"


class FourthCalls(HashEngine):
    """The fourth token of a response to a prompt of one is s."""

    def probabilities(self, tokens):
        p = super().probabilities(tokens)
        return [float(token == CALL) + 1e-9 for token in range(len(p))] if len(tokens) == 4 else p


def test_copies_of_a_row_share_the_answer_that_it_waits_for():
    """The tree is left at a call: one branch, which three trajectories go on from."""
    config, environment = KTConfig(prob_filter_abs_thres=1.0, force_return_step=4), Calls(1)
    tree = grown(FourthCalls(), [1], 3, config, 40, 1, environment=environment)
    assert len(environment.answered) == 1 == tree.metrics["tool_calls"]
    assert sum(segment.author == TOOL for segment in tree.segments) == 1 and len(tree.leaves) == 3
    assert len({tuple(tokens) for tokens in tree.trajectories()}) > 1


@pytest.mark.parametrize("max_tokens", [4, 5, 6])
@pytest.mark.parametrize("leave", [4, -1])
def test_a_call_without_tokens_for_its_answer_ends_the_row_and_is_made_once(max_tokens, leave):
    config, environment = KTConfig(prob_filter_abs_thres=1.0, force_return_step=leave), Calls(1)
    tree = grown(FourthCalls(), [1], 3, config, max_tokens, 1, environment=environment)
    assert len(environment.answered) == 1
    assert {len(tokens) for tokens in tree.trajectories()} == {4} and tree.trajectories()[0][-1] == CALL


class Hesitant(RolloutEngine):
    """Never ends; its second candidate opens a branch after each prefix of a length in `forks`. Counts requests."""

    def __init__(self, forks):
        self.forks, self.asked, self.running, self.most_running = set(forks), [], 0, 0

    async def generate(self, request):
        self.asked.append((len(request.prompt_ids) - 1, request.max_tokens))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        result = Generation([], [], [])
        for at in range(len(request.prompt_ids) - 1, len(request.prompt_ids) - 1 + request.max_tokens):
            first = hash((tuple(request.prompt_ids), *result.token_ids)) % 100 * 2
            second = math.log(0.4 if at in self.forks else 0.1)
            result.top_logprobs.append([(first, math.log(0.5)), (first + 1, second)])
            result.token_ids.append(first)
            result.log_probs.append(math.log(0.5))
        return result


def grow_hesitantly(k, forks, **config):
    engine = Hesitant(forks)
    tree = LookaheadTree(k, KTConfig(rollout_filter_steps=[20, 50], chunk_size=16, **config), 1024, [-1])
    asyncio.run(TreeGrower(TreeBuilder(engine, [1], max_tokens=1024, stop_token_ids=[-1]), tree, seed=0).grow())
    return engine, tree


def test_a_branch_is_asked_for_up_to_the_exit_in_one_request():
    """The root's first chunk shows the fork of step 3; both rows are then asked for what is read before the exit."""
    engine, tree = grow_hesitantly(2, [3])
    assert tree.step == 3 + 50 + 2  # the branch is past its last comparison
    assert engine.asked == [(0, 16), (4, 51), (16, 39)]
    assert sum(n for _, n in engine.asked) == 55 + 51, "no token of a row that is kept is of no use"
    assert engine.most_running == 2, "the root is asked while its branch is waited for"


def test_a_tree_that_never_fills_is_asked_for_in_ever_longer_requests():
    engine, tree = grow_hesitantly(2, [])
    assert tree.step == 512 and len(tree.rows) == 1
    assert len(engine.asked) < 10
    assert sum(n for _, n in engine.asked) == 512


def test_young_branches_are_asked_for_up_to_the_next_comparison_where_most_are_dropped():
    engine, tree = grow_hesitantly(2, range(0, 400, 21), random_pruning_ratio=1.0, keep_math_symbols=False)
    assert len(tree.record.pruned) > 5
    births = {step for step, *_ in tree.record.births}
    of_branches = [n for at, n in engine.asked if at - 1 in births]
    assert of_branches[0] > 19 and of_branches[-1] == 19
