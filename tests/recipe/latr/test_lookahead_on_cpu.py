"""How much LATR's tree asks the engine for at once; test_tools_on_cpu.py has the tree itself."""

import asyncio
import math

from recipe.latr.keys import KTConfig
from recipe.latr.lookahead import LookaheadTree
from recipe.latr.tree import TreeGrower
from verl.workers.rollout.engines.interface import Generation, RolloutEngine
from verl.workers.rollout.tree_builder import TreeBuilder


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
