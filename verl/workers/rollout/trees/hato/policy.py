"""HATO's search as a tree policy: the search says what to expand, the engine continues.

    a round    search.next() -> expansions -> all their children at once -> features -> V, U, R_local -> the tree

Only the rounds of one tree wait for each other. With tools, a step also ends with a call, and the tool's result belongs
to it; a step that runs to the final answer goes through all its calls.
"""

import copy
import random
from collections.abc import Callable, Sequence

from verl.workers.config.hato import hato_config
from verl.workers.rollout.entropy import mean_entropy
from verl.workers.rollout.growth import Ask, BranchPolicy, Growth, Path, Score
from verl.workers.rollout.rollout_engine import Generation, gather_or_cancel
from verl.workers.rollout.trajectory_tree import MODEL, Segment, TrajectoryTree
from verl.workers.rollout.trees.hato.config import REWARD_LOOP, HATOConfig, TreeConfig
from verl.workers.rollout.trees.hato.frontier import ROOT, Frontier
from verl.workers.rollout.trees.hato.local_reward import LocalReward, Step, local_reward, local_reward_function
from verl.workers.rollout.trees.hato.messages import HATO_STEPS, MAX_NODES, SETTINGS, STEP_INFO, unpack
from verl.workers.rollout.trees.hato.search import Expansion, Search
from verl.workers.rollout.trees.hato.step_features import FEATURES, agreement, step_features
from verl.workers.rollout.trees.hato.value_model import ValueModel, value_model_of


class Policy(BranchPolicy):
    """`tree=hato`: 1 to n trajectories, a leaf each.

    Args:
        config: everything under `hato`.
        value_model: V and U of a step; one for all prompts of a worker, as new as the newest prompt's settings.
        local_reward: R_local of a step; may be a coroutine function. None: the reward loop's.
        decode: token ids to text, for local rewards that read it.
        temperature: of sampling; None: the prompt's.
    """

    fields = {"local_rewards": ("local_reward", 0.0), "draws": ("count", 1)}

    def __init__(
        self,
        config: HATOConfig,
        value_model: ValueModel,
        local_reward: LocalReward | None,
        decode: Callable[[Sequence[int]], str] | None = None,
        temperature: float | None = None,
    ):
        self.config, self.bounds, self.value_model = config, config.tree, value_model
        self.local_reward, self.decode, self.temperature = local_reward, decode, temperature
        self.learnt_until: int | None = None

    @classmethod
    def from_config(cls, config, tokenizer=None) -> "Policy":
        hato = hato_config(config)
        by_name = hato.local_reward != REWARD_LOOP
        return cls(
            hato,
            value_model_of(hato, config.actor_rollout_ref.rollout.seed),
            local_reward_function(hato.local_reward) if by_name else None,
            None if tokenizer is None else tokenizer.decode,
        )

    def of_prompt(self, prompt, score: Score | None) -> "Policy":
        settings, max_nodes = prompt.pop(SETTINGS, {}), prompt.pop(MAX_NODES, None)
        if "value_model" in settings and settings["step"] != self.learnt_until:
            self.value_model.load_state_dict(unpack(settings["value_model"]))
            self.learnt_until = settings["step"]
        policy = copy.copy(self)
        policy.temperature = settings.get("temperature")
        if max_nodes is not None:
            policy.bounds = TreeConfig(**{**vars(self.bounds), "max_nodes": int(max_nodes)})
        if self.local_reward is None:
            policy.local_reward = self._by_the_reward_loop(score)
        return policy

    def _by_the_reward_loop(self, score: Score | None) -> LocalReward:
        if score is None:
            raise ValueError(f"hato.local_reward={REWARD_LOOP} needs rewards that are computed during the rollout")

        async def of_step(step: Step) -> float:
            about = {"before": self.decode(step.before), "step": self.decode(step.tokens)}
            return await score([*step.before, *step.tokens], {STEP_INFO: about})

        return of_step

    async def grow(self, growth: Growth, n: int) -> None:
        frontier = Frontier(growth.tree, self.bounds.max_nodes)
        temperature = growth.sampling.temperature if self.temperature is None else self.temperature
        search = Search(
            frontier, self.bounds, self.config.exploration, n_leaves=n, seed=growth.seed, temperature=temperature
        )
        while expansions := search.next():
            await Round(self, growth, frontier).grow(expansions)
        growth.tree.leaves = [frontier.steps[leaf].segments[-1] for leaf in frontier.leaves()]
        growth.tree.metrics = frontier.metrics()

    def about_tree(self, tree: TrajectoryTree) -> dict:
        """What the value model learns from: the features and V of every step that was kept, by its segment's id."""
        kept = sorted({i for leaf in tree.leaves for i in tree.path(leaf)})
        steps = {i: tree.segments[i].info for i in kept if "value" in tree.segments[i].info}
        about = {
            "segments": list(steps),
            "features": [info["features"] for info in steps.values()],
            "values": [info["value"] for info in steps.values()],
        }
        for segment in tree.segments:  # not for the viewer
            segment.info.pop("features", None)
        return {HATO_STEPS: about}


class Round:
    """The children of some steps, drawn together."""

    def __init__(self, policy: Policy, growth: Growth, frontier: Frontier):
        self.policy, self.growth, self.frontier, self.config = policy, growth, frontier, policy.config

    async def grow(self, expansions: Sequence[Expansion]) -> None:
        """Draw all children and add them to the tree."""
        drawn = [(expansion, child) for expansion in expansions for child in range(expansion.children)]
        made = await gather_or_cancel(*(self._continue(expansion, child) for expansion, child in drawn))
        siblings: dict[int, list[set[int]]] = {expansion.node: [] for expansion in expansions}
        for (expansion, _), (generation, _, _) in zip(drawn, made, strict=True):
            siblings[expansion.node].append(set(generation.token_ids))
        features = [
            self._features(expansion, generation, _without(siblings[expansion.node], child))
            for (expansion, child), (generation, _, _) in zip(drawn, made, strict=True)
        ]
        values, uncertainties = (column.tolist() for column in self.policy.value_model.predict(features))
        # identical siblings are one step: a process reward model is asked once
        asked = {
            (expansion.node, tuple(generation.token_ids)): generation
            for (expansion, _), (generation, _, _) in zip(drawn, made, strict=True)
        }
        scores = await gather_or_cancel(*(self._local(node, step) for (node, _), step in asked.items()))
        local = dict(zip(asked, scores, strict=True))
        for i, ((expansion, _), (generation, segments, ended)) in enumerate(zip(drawn, made, strict=True)):
            about = {"value": values[i], "uncertainty": uncertainties[i], "features": features[i]}
            about["entropy"] = features[i][FEATURES.index("mean_entropy")]
            about["local_reward"] = local[expansion.node, tuple(generation.token_ids)]
            segments[0].info.update(about)
            self.frontier.add(expansion.node, segments, ended=ended, value=values[i], uncertainty=uncertainties[i])

    def _path(self, number: int) -> Path:
        return self.frontier.steps[number].path

    def _most_tokens(self, expansion: Expansion) -> int:
        left = self.growth.tokens_left(self._path(expansion.node))
        return left if expansion.to_the_end else min(left, self.config.tree.max_step_tokens)

    async def _continue(self, expansion: Expansion, child: int) -> tuple[Generation, list[Segment], bool]:
        """What the model writes first, the step's segments, and whether the path has ended with them."""
        growth, path = self.growth, self._path(expansion.node)
        seed = random.Random(f"{growth.seed} {expansion.node} {child}").getrandbits(31)
        ask = Ask(
            path,
            seed,
            self._most_tokens(expansion),
            () if expansion.to_the_end else (self.config.tree.step_delimiter,),
            temperature=expansion.temperature,
            n_entropy=self.config.uncertainty.entropy_top_k,
        )
        generation = await growth.ask(ask)
        segments = [Segment(None, generation.token_ids, generation.log_probs)]
        path = path.then(segments[0])
        if growth.waits_for_reply(path):
            if expansion.to_the_end:
                return generation, segments + await growth.finish(path, seed, expansion.temperature), True
            reply = await growth.reply(path)
            if isinstance(reply, str):
                return generation, segments, True
            segments.append(reply)
            path = path.then(reply)
        return generation, segments, expansion.to_the_end or growth.has_ended(path)

    def _features(self, expansion: Expansion, generation: Generation, siblings: list[set[int]]) -> list[float]:
        vocab_size = self.growth.vocab_size
        entropies = [mean_entropy(generation.entropies, vocab_size)] if generation.entropies else []
        return step_features(
            log_probs=generation.log_probs,
            entropies=entropies,
            path_log_probs=[*self.frontier.path_log_probs(expansion.node), *generation.log_probs],
            max_tokens=self._most_tokens(expansion),
            depth=self.frontier.steps[expansion.node].depth + 1,
            max_depth=self.config.tree.max_depth,
            siblings_agreement=agreement(set(generation.token_ids), siblings),
            budget_used=self.frontier.n_kept / self.frontier.max_nodes,
            finished=bool(generation.token_ids) and generation.token_ids[-1] in self.growth.stop_token_ids,
        )

    async def _local(self, node: int, generation: Generation) -> float:
        tree, parent = self.growth.tree, self.growth.tree.prompt_ids
        if node != ROOT:
            segments = [tree.segments[i] for i in self.frontier.steps[node].segments]
            parent = [token for segment in segments if segment.author == MODEL for token in segment.token_ids]
        step = Step(
            problem=tree.prompt_ids,
            before=list(self._path(node).tokens),
            parent=parent,
            tokens=generation.token_ids,
            decode=self.policy.decode,
        )
        return await local_reward(self.policy.local_reward, step)


def _without(items: list, index: int) -> list:
    return [*items[:index], *items[index + 1 :]]
