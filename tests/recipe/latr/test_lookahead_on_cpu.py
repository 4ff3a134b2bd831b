"""The tree of the chunked decoder is that of the step-by-step algorithm, over random models, prompts and configs.

The reference below is written from the algorithm's description, slowly: one forward pass over the whole sequence for
every row and step, plain lists, its own edit distance.
"""

import asyncio
import math
import random

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from recipe.latr.keys import KTConfig
from recipe.latr.lookahead import LookaheadTree
from recipe.latr.tree import TreeGrower
from verl.workers.rollout.engines.interface import Generation, RolloutEngine
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.tree_builder import TreeBuilder

VOCABULARY, EOS = 24, {22, 23}  # several, so that rows end often enough


def text_of(token: int) -> str:
    """Tokens 0 to 3 are mathematical symbols."""
    return "+-*/"[token] if token < 4 else chr(ord("a") + token - 4)


def random_model(seed: int) -> Qwen2ForCausalLM:
    """float64, so that no two candidates are equal by rounding; peaked enough to branch now and then."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,
        tie_word_embeddings=False,
    )
    return Qwen2ForCausalLM(config).double().eval()


# ---- the reference ----


def slow_edit_distance(a, b):
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            previous, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, previous + (x != y))
    return row[-1]


def slow_lcs(a, b):
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


def slow_suffix(a, b):
    best = 0
    for x, y in ((a, b), (b, a)):
        for length in range(1, len(x) + 1):
            if any(y[i : i + length] == x[-length:] for i in range(len(y) - length + 1)):
                best = max(best, length)
    return best


def reference_tree(model, prompt, k, config, max_new_tokens):
    """(rows as (number, tokens), births, prunings, suppressions); greedy growth only."""
    rows = [{"id": 0, "parent": None, "birth": 0, "tokens": [], "done": False}]
    births, prunings, suppressions = [], [], []
    for t in range(max_new_tokens):
        # 1. candidates of every unfinished row
        for row in rows:
            if not row["done"]:
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + row["tokens"]])).logits[0, -1]
                p = torch.softmax(logits, -1)
                order = sorted(range(VOCABULARY), key=lambda token, p=p: -float(p[token]))
                row["top_logprobs"] = [(token, float(p[token])) for token in order[: config.max_n_branch_per_token]]
        # 2. capacity
        wanted = [(0, position) for position in range(len(rows))]
        for position, row in enumerate(rows):
            if row["done"]:
                continue
            first = row["top_logprobs"][0][1]
            for rank in range(1, config.max_n_branch_per_token):
                chance = row["top_logprobs"][rank][1]
                if chance > config.prob_filter_abs_thres and first - chance < config.prob_filter_rel_thres:
                    wanted.append((rank, position))
        wanted.sort()
        kept, lost = wanted[:k], wanted[k:]
        suppressions += [(t, rows[position]["id"], rank) for rank, position in lost]
        # 3. births in (row, rank) order, then the old rows' first candidates
        new = []
        for position, rank in sorted((position, rank) for rank, position in kept if rank):
            parent = rows[position]
            token = parent["top_logprobs"][rank][0]
            births.append((t, len(births) + 1, parent["id"], rank, token))
            new.append(
                {
                    "id": len(births),
                    "parent": parent["id"],
                    "birth": t,
                    "tokens": parent["tokens"] + [token],
                    "done": False,
                }
            )
        for row in rows:
            if not row["done"]:
                row["tokens"].append(row["top_logprobs"][0][0])
        rows += new
        # 4. lookahead pruning
        bad = set()
        for r in config.rollout_filter_steps:
            for row in rows:
                if row["parent"] is None or row["birth"] != t + 1 - r:
                    continue
                parent = next(other for other in rows if other["id"] == row["parent"])
                a, b = row["tokens"][-r:], parent["tokens"][-r:]
                if row["done"] or parent["done"] or EOS & {*a, *b}:
                    continue
                if config.keep_math_symbols and b[0] < 4:
                    continue
                if config.rollout_filter_edit_dist_thres is not None:
                    if slow_edit_distance(a, b) / r < config.rollout_filter_edit_dist_thres:
                        bad.add(row["id"])
                if config.rollout_filter_suffix_match_thres is not None:
                    if slow_suffix(a, b) / r > config.rollout_filter_suffix_match_thres:
                        bad.add(row["id"])
                if config.rollout_filter_rouge_l_thres is not None:
                    if slow_lcs(a, b) / r > config.rollout_filter_rouge_l_thres:
                        bad.add(row["id"])
        grew = True
        while grew:
            more = {row["id"] for row in rows if row["parent"] in bad} - bad
            bad |= more
            grew = bool(more)
        prunings += sorted((t, number) for number in bad)
        rows = [row for row in rows if row["id"] not in bad]
        # 5. finished rows
        for row in rows:
            row["done"] = row["done"] or row["tokens"][-1] in EOS
        # 6. exit
        if all(row["done"] for row in rows) or (config.force_return_step != -1 and t + 1 >= config.force_return_step):
            break
        share = config.return_nb_thres_init - config.return_nb_thres_decay * t / max_new_tokens
        if config.return_on_full and len(rows) >= round(k * share):
            if all(row["birth"] + max(config.rollout_filter_steps) < t for row in rows):
                break
    return [(row["id"], row["tokens"]) for row in rows], births, prunings, suppressions


# ---- the comparison ----


def random_config(generator: random.Random, chunk_size: int) -> KTConfig:
    return KTConfig(
        max_n_branch_per_token=generator.choice([2, 2, 3, 4]),
        prob_filter_abs_thres=generator.choice([0.05, 0.1, 0.2]),
        prob_filter_rel_thres=generator.choice([0.2, 0.4, 0.8]),
        rollout_filter_steps=generator.choice([[3], [4, 8], [2, 5, 9]]),
        rollout_filter_edit_dist_thres=generator.choice([None, 0.4, 0.7]),
        rollout_filter_suffix_match_thres=generator.choice([None, 0.2, 0.5]),
        rollout_filter_rouge_l_thres=generator.choice([None, 0.5]),
        keep_math_symbols=generator.random() < 0.5,
        return_on_full=generator.random() < 0.7,
        return_nb_thres_decay=generator.choice([0.0, 0.05, 0.5]),
        force_return_step=generator.choice([-1, 11, 30]),
        chunk_size=chunk_size,
    )


def grown(model, prompt, k, config, max_new_tokens):
    tree = LookaheadTree(k, config, max_new_tokens, sorted(EOS), text_of)
    builder = TreeBuilder(TransformersEngine(model), prompt, max_tokens=max_new_tokens, stop_token_ids=sorted(EOS))
    asyncio.run(TreeGrower(builder, tree, seed=0).grow())
    births = [(b["step"], b["row"], b["parent"], b["rank"], b["token"]) for b in tree.record.births]
    suppressions = [(s["step"], s["row"], s["rank"]) for s in tree.record.suppressed]
    prunings = sorted((p["step"], p["row"]) for p in tree.record.pruned)
    return [(row.number, row.tokens) for row in tree.rows], births, prunings, suppressions


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_is_that_of_the_step_by_step_algorithm(seed):
    generator = random.Random(seed)
    model = random_model(seed)
    prompt = [generator.randrange(VOCABULARY - 2) for _ in range(generator.randint(1, 6))]
    k, max_new_tokens = generator.choice([1, 2, 4, 8]), generator.choice([1, 12, 40])
    state = generator.getstate()
    found = []
    for chunk_size in (1, 7, 64):
        generator.setstate(state)
        config = random_config(generator, chunk_size)
        found.append(grown(model, prompt, k, config, max_new_tokens))
    expected = reference_tree(model, prompt, k, config, max_new_tokens)
    for rows, births, prunings, suppressions in found:
        assert rows == expected[0]
        assert births == expected[1]
        assert prunings == sorted(expected[2])
        assert suppressions == expected[3]


def test_the_random_trees_exercise_everything():
    """The comparison above means something only if trees branch, are pruned and are over capacity."""
    births = prunings = suppressions = finished = 0
    for seed in range(60):
        generator = random.Random(seed)
        model = random_model(seed)
        prompt = [generator.randrange(VOCABULARY - 2) for _ in range(generator.randint(1, 6))]
        k, max_new_tokens = generator.choice([1, 2, 4, 8]), generator.choice([1, 12, 40])
        rows, b, p, s = grown(model, prompt, k, random_config(generator, 64), max_new_tokens)
        births, prunings, suppressions = births + len(b), prunings + len(p), suppressions + len(s)
        finished += sum(tokens[-1] in EOS for _, tokens in rows)
    assert min(births, prunings, suppressions, finished) > 20, (births, prunings, suppressions, finished)


# ---- how much is asked for at once ----


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
            result.top_logprobs.append(
                [(first, math.log(0.5)), (first + 1, math.log(0.4 if at in self.forks else 0.1))]
            )
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


def test_branches_that_will_open_are_asked_for_at_once():
    engine, tree = grow_hesitantly(8, [3, 7, 11], prob_filter_rel_thres=0.2, prob_filter_abs_thres=0.3)
    assert len(tree.rows) == 8 and tree.step == 11 + 50 + 2
    assert engine.most_running > 1
    # 8 rows, each born with a single request; then once more up to the exit where that came too early
    assert len(engine.asked) <= 16


def test_a_tree_that_never_fills_is_asked_for_in_ever_longer_requests():
    engine, tree = grow_hesitantly(2, [])
    assert tree.step == 512 and len(tree.rows) == 1
    assert len(engine.asked) < 10
    assert sum(n for _, n in engine.asked) == 512


def test_young_branches_are_asked_for_up_to_the_next_comparison_where_most_are_dropped():
    engine, tree = grow_hesitantly(2, range(0, 400, 21), random_pruning_ratio=1.0, keep_math_symbols=False)
    assert len(tree.record.pruned) > 5
    births = {event["step"] for event in tree.record.births}
    of_branches = [n for at, n in engine.asked if at - 1 in births]
    assert of_branches[0] > 19 and of_branches[-1] == 19
