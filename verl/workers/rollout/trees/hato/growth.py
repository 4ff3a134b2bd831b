"""Grows a problem's reasoning tree on an engine: the search says what to expand, the engine continues.

    a round    search.next() -> expansions -> all their children at once -> features -> V, U, R_local -> the tree

Only the rounds of one tree wait for each other; the trees of a batch grow on their own. Requests of one tree have one
request id, so that they reach the replica that has their prefix cached.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from verl.workers.rollout.entropy import mean_entropy
from verl.workers.rollout.rollout_engine import Generation, RolloutEngine, gather_or_cancel
from verl.workers.rollout.trees.hato.config import HATOConfig
from verl.workers.rollout.trees.hato.rewards import LocalReward, Step, local_reward
from verl.workers.rollout.trees.hato.search import Expansion, Search
from verl.workers.rollout.trees.hato.step_features import FEATURES, agreement, step_features
from verl.workers.rollout.trees.hato.tree import ROOT, ReasoningTree
from verl.workers.rollout.trees.hato.value_model import ValueModel


@dataclass(frozen=True)
class Growth:
    """A finished tree.

    Args:
        tree: complete: every path of kept nodes ends in a leaf.
        features: of every node, what the value model saw (`step_features`); zeros for the root.
    """

    tree: ReasoningTree
    features: list[list[float]]


class TreeGrowth:
    """One problem.

    Args:
        engine: where steps come from.
        prompt_ids: the problem.
        n: leaves at most; at least one.
        config: everything under `hato`.
        room: response tokens of a path.
        stop_token_ids: end a path.
        vocab_size: |V|, the unit of entropies.
        tokenizer: for local rewards that read text.
        temperature, top_p, top_k: of sampling.
        value_model: V and U of a step.
        local_reward: R_local of a step; may be a coroutine function.
        seed: of the problem; every request's seed follows from it, the node and the child's number.
        request_id: of all requests.
        max_nodes: less than the config's, where trees share a budget.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompt_ids: Sequence[int],
        n: int,
        config: HATOConfig,
        *,
        room: int,
        stop_token_ids: Sequence[int],
        vocab_size: int,
        value_model: ValueModel,
        local_reward: LocalReward,
        tokenizer=None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = -1,
        seed: int = 0,
        request_id: str | None = None,
        max_nodes: int | None = None,
    ):
        self.engine, self.config, self.room, self.vocab_size = engine, config, room, vocab_size
        self.value_model, self.local_reward, self.tokenizer, self.seed = value_model, local_reward, tokenizer, seed
        self.sampling = {"top_p": top_p, "top_k": top_k, "stop_token_ids": stop_token_ids, "request_id": request_id}
        bounds = config.tree if max_nodes is None else replace(config.tree, max_nodes=max_nodes)
        self.tree = ReasoningTree(prompt_ids, bounds.max_nodes)
        self.search = Search(self.tree, bounds, config.exploration, n_leaves=n, seed=seed, temperature=temperature)
        self.features: list[list[float]] = [[0.0] * len(FEATURES)]

    async def run(self) -> Growth:
        while expansions := self.search.next():
            await self._grow(expansions)
        return Growth(self.tree, self.features)

    async def _grow(self, expansions: Sequence[Expansion]) -> None:
        drawn = [(one, child) for one in expansions for child in range(one.children)]
        before = {one.node: self._before(one.node) for one in expansions}
        found = await gather_or_cancel(*(self._continue(one, child, before[one.node]) for one, child in drawn))
        made = [(one, child, generation) for (one, child), generation in zip(drawn, found, strict=True)]
        siblings: dict[int, list[set[int]]] = {one.node: [] for one in expansions}
        for one, _, generation in made:
            siblings[one.node].append(set(generation.token_ids))
        rows = [
            self._features(one, generation, before[one.node][1], _without(siblings[one.node], child))
            for one, child, generation in made
        ]
        values, uncertainties = (column.tolist() for column in self.value_model.predict(rows))
        # identical siblings are one step: a process reward model is asked once
        steps = {(one.node, tuple(generation.token_ids)): generation for one, _, generation in made}
        asked = (self._local(node, step, before[node][0]) for (node, _), step in steps.items())
        local = dict(zip(steps, await gather_or_cancel(*asked), strict=True))
        for i, (one, _, generation) in enumerate(made):
            node = self.tree.add(
                one.node,
                generation.token_ids,
                generation.log_probs,
                ended=self._ends(one, generation, before[one.node][0]),
                entropy=rows[i][FEATURES.index("mean_entropy")],
                value=values[i],
                uncertainty=uncertainties[i],
                local_reward=local[one.node, tuple(generation.token_ids)],
            )
            if node == len(self.features):  # not merged into an older sibling
                self.features.append(rows[i])

    def _before(self, node: int) -> tuple[list[int], list[float]]:
        """Tokens and log-probabilities from the first step to this one."""
        steps = [self.tree.nodes[step] for step in self.tree.path(node)]
        return [t for step in steps for t in step.token_ids], [p for step in steps for p in step.log_probs]

    def _bound(self, expansion: Expansion, tokens_before: int) -> int:
        left = self.room - tokens_before
        return left if expansion.to_the_end else min(left, self.config.tree.max_step_tokens)

    async def _continue(self, expansion: Expansion, child: int, before: tuple[list[int], list[float]]) -> Generation:
        tokens, _ = before
        return await self.engine.generate(
            [*self.tree.prompt_ids, *tokens],
            max_tokens=self._bound(expansion, len(tokens)),
            stop=() if expansion.to_the_end else (self.config.tree.step_delimiter,),
            temperature=expansion.temperature,
            seed=random.Random(f"{self.seed} {expansion.node} {child}").getrandbits(31),
            n_entropy=self.config.uncertainty.entropy_top_k,
            **self.sampling,
        )

    def _ends(self, expansion: Expansion, generation: Generation, tokens_before: Sequence[int]) -> bool:
        full = len(tokens_before) + len(generation.token_ids) >= self.room
        return expansion.to_the_end or generation.stopped or full

    def _features(
        self, expansion: Expansion, generation: Generation, path: list[float], siblings: list[set[int]]
    ) -> list[float]:
        entropies = [mean_entropy(generation.entropies, self.vocab_size)] if generation.entropies else []
        return step_features(
            log_probs=generation.log_probs,
            entropies=entropies,
            path_log_probs=[*path, *generation.log_probs],
            max_tokens=self._bound(expansion, len(path)),
            depth=self.tree.nodes[expansion.node].depth + 1,
            max_depth=self.config.tree.max_depth,
            siblings_agreement=agreement(set(generation.token_ids), siblings),
            budget_used=self.tree.n_kept / self.tree.max_nodes,
            finished=generation.stopped,
        )

    async def _local(self, node: int, generation: Generation, before: list[int]) -> float:
        parent = self.tree.prompt_ids if node == ROOT else self.tree.nodes[node].token_ids
        decode = self.tokenizer.decode if self.tokenizer else None
        step = Step(
            problem=self.tree.prompt_ids, before=before, parent=parent, tokens=generation.token_ids, decode=decode
        )
        return await local_reward(self.local_reward, step)


def _without(items: list, index: int) -> list:
    return [*items[:index], *items[index + 1 :]]
