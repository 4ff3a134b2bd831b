"""HATO's rollout, `actor_rollout_ref.rollout.name=hato`: a searched tree per prompt, a row of the batch per leaf.

The trainer sends `SETTINGS` with the prompts: the temperature of the step and the value model as it has learnt so far.
Back come the rows, each with its `LEAF`, and with the first one the tree (`TREE_STATE`): what rewards, advantages and
the value model need of it, without tokens. Validation samples the ordinary way.
"""

import time
from collections.abc import Sequence
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

from verl.workers.rollout.group_rollout import GroupRollout, VersionRecorder
from verl.workers.rollout.rollout_engine import gather_or_cancel
from verl.workers.rollout.trees.hato.config import REWARD_LOOP, HATOConfig
from verl.workers.rollout.trees.hato.growth import Growth, TreeGrowth
from verl.workers.rollout.trees.hato.messages import LEAF, MAX_NODES, SETTINGS, STEP_INFO, TREE_STATE, unpack
from verl.workers.rollout.trees.hato.metrics import tree_metrics
from verl.workers.rollout.trees.hato.rewards import Step, local_reward_function
from verl.workers.rollout.trees.hato.tree import LeafRow
from verl.workers.rollout.trees.hato.value_model import value_model_of


class HATORollout(GroupRollout):
    """One tree per prompt; one value model for all prompts of a worker, as new as the newest prompts' settings."""

    def __init__(self, config, agent_loop, engine, tokenizer):
        super().__init__(config, agent_loop, engine, tokenizer)
        self.hato = HATOConfig.from_dict(config.hato)
        self.value_model = value_model_of(self.hato, config.actor_rollout_ref.rollout.seed)
        self.learnt_until: int | None = None
        by_name = self.hato.local_reward != REWARD_LOOP
        self.local_reward = local_reward_function(self.hato.local_reward) if by_name else None

    async def run(self, prompt: dict[str, Any], n: int, sampling_params: dict[str, Any]) -> list[AgentLoopOutput]:
        started, prompt_ids = time.perf_counter(), await self.prompt_ids(prompt)
        # taken out: upstream stores what is left of a prompt with every row
        settings, max_nodes = prompt.pop(SETTINGS, {}), prompt.pop(MAX_NODES, None)
        self._learn(settings)
        engine = VersionRecorder(self.engine, sampling_params)
        growth = await TreeGrowth(
            engine,
            prompt_ids,
            n,
            self.hato,
            room=self.room(len(prompt_ids)),
            stop_token_ids=self.stop_token_ids,
            vocab_size=len(self.tokenizer),
            value_model=self.value_model,
            local_reward=self.local_reward or self._by_the_reward_loop(prompt, prompt_ids),
            tokenizer=self.tokenizer,
            temperature=settings.get("temperature", sampling_params["temperature"]),
            top_p=sampling_params["top_p"],
            top_k=sampling_params["top_k"],
            seed=self.seed_of(prompt),
            request_id=prompt["uid"],
            max_nodes=None if max_nodes is None else int(max_nodes),
        ).run()
        rows = growth.tree.rows(n)
        outputs = self._outputs(rows, prompt_ids, engine.versions(), time.perf_counter() - started)
        await self._verify_once(rows, outputs, prompt)
        outputs[0].extra_fields |= self._about_tree(growth, rows, prompt, engine.tokens)
        return outputs

    def _learn(self, settings: dict) -> None:
        if "value_model" in settings and settings["step"] != self.learnt_until:
            self.value_model.load_state_dict(unpack(settings["value_model"]))
            self.learnt_until = settings["step"]

    def _outputs(
        self, rows: Sequence[LeafRow], prompt_ids: list[int], versions: dict[str, int], seconds: float
    ) -> list[AgentLoopOutput]:
        return [
            AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=row.token_ids,
                response_mask=row.mask,
                response_logprobs=row.log_probs,
                num_turns=2,
                metrics=AgentLoopMetrics(generate_sequences=seconds),
                extra_fields={"turn_scores": [], "tool_rewards": [], LEAF: row.leaf} | versions,
            )
            for row in rows
        ]

    async def _verify_once(self, rows: Sequence[LeafRow], outputs: list[AgentLoopOutput], prompt: dict) -> None:
        """A leaf that stands in several rows is verified once; elsewhere where rewards come after the rollout."""
        if self.compute_score is None:
            return
        first: dict[int, AgentLoopOutput] = {}
        for row, output in zip(rows, outputs, strict=True):
            first.setdefault(row.leaf, output)
        scored = list(first.values())
        await gather_or_cancel(*(self.compute_score([one], prompt | {"session_id": 0}) for one in scored))
        for row, output in zip(rows, outputs, strict=True):
            known = first[row.leaf]
            if output is not known and known.reward_score is not None:
                output.reward_score = known.reward_score
                output.extra_fields["reward_extra_info"] = known.extra_fields["reward_extra_info"]

    def _by_the_reward_loop(self, prompt: dict, prompt_ids: list[int]):
        async def score(step: Step) -> float:
            about = {"before": self.tokenizer.decode(step.before), "step": self.tokenizer.decode(step.tokens)}
            output = AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=[*step.before, *step.tokens],
                response_mask=[1] * (len(step.before) + len(step.tokens)),
                num_turns=2,
                metrics=AgentLoopMetrics(),
                extra_fields={},
            )
            info = {**(prompt.get("extra_info") or {}), STEP_INFO: about}
            await self.compute_score([output], prompt | {"session_id": 0, "extra_info": info})
            return output.reward_score

        if self.compute_score is None:
            raise ValueError(f"hato.local_reward={REWARD_LOOP} needs rewards that are computed during the rollout")
        return score

    def _about_tree(self, growth: Growth, rows: Sequence[LeafRow], prompt: dict, tokens: int) -> dict[str, Any]:
        shown = growth.tree.to_trajectory_tree([row.leaf for row in rows])
        shown.metrics = tree_metrics(growth.tree)
        state = {"structure": growth.tree.structure(), "features": growth.features}
        return {TREE_STATE: state} | self.about_group(shown, prompt, tokens)
