"""Tool-using agents as a group rollout: `actor_rollout_ref.rollout.mode=sync_with_tool`, as in the authors' configs.

Training branches (tool_tree/growth.py); validation makes n trajectories that do not, with the same tools and limits.
Keys: verl/workers/config/tool_rollout.py.
"""

import time
from dataclasses import replace
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.utils.config import omega_conf_to_dataclass

from verl.workers.rollout.group_rollout import GroupRollout, VersionRecorder
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox
from verl.workers.rollout.trajectory_tree import TOOL, TrajectoryTree
from verl.workers.rollout.trees.arpo.config import ToolTreeConfig
from verl.workers.rollout.trees.arpo.growth import ToolTree


class ToolRollout(GroupRollout):
    """n trajectories of a prompt that call tools; one tool box for all prompts of a worker."""

    def __init__(self, config, agent_loop, engine, tokenizer):
        super().__init__(config, agent_loop, engine, tokenizer)
        rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        self.tools = ToolBox(rollout.tools)
        self.protocol = Protocol(tokenizer, list(self.tools.tools))
        self.tree_config = rollout.tree_config()

    async def run(self, prompt: dict[str, Any], n: int, sampling_params: dict[str, Any]) -> list[AgentLoopOutput]:
        return await self._run(prompt, n, sampling_params, self.tree_config, trains=True)

    async def validate(self, prompt: dict[str, Any], n: int, sampling_params: dict[str, Any]) -> list[AgentLoopOutput]:
        """n trajectories that share nothing."""
        plain = replace(self.tree_config, branch_policy="never", enable_dynamic_rollouts=False)
        return await self._run(prompt, n, sampling_params, plain, trains=False)

    async def _run(self, prompt, n, sampling_params, config: ToolTreeConfig, trains: bool) -> list[AgentLoopOutput]:
        started, prompt_ids = time.perf_counter(), await self.prompt_ids(prompt)
        engine = VersionRecorder(self.engine, sampling_params)
        tree = await ToolTree(
            engine,
            self.tools,
            self.protocol,
            prompt_ids,
            n,
            config,
            room=self.room(len(prompt_ids)),
            stop_token_ids=self.stop_token_ids,
            sampling={name: sampling_params[name] for name in ("temperature", "top_p", "top_k")},
            seed=self.seed_of(prompt),
            request_id=prompt["uid"],
        ).run()
        return self._outputs(tree, prompt, engine, time.perf_counter() - started, trains)

    def _outputs(
        self, tree: TrajectoryTree, prompt: dict, engine: VersionRecorder, seconds: float, trains: bool
    ) -> list[AgentLoopOutput]:
        about_group = self.about_group(tree, prompt, engine.tokens)
        columns = (tree.leaves, tree.trajectories(), tree.response_masks(), tree.log_probs(), tree.segment_ids())
        outputs = []
        for i, (leaf, tokens, mask, log_probs, segment_ids) in enumerate(zip(*columns, strict=True)):
            calls = [s.info for s in map(tree.segments.__getitem__, tree.path(leaf)) if s.author == TOOL]
            in_tools = sum(call["seconds"] for call in calls)
            outputs.append(
                AgentLoopOutput(
                    prompt_ids=tree.prompt_ids,
                    response_ids=tokens,
                    response_mask=mask,
                    response_logprobs=log_probs,
                    num_turns=2 + 2 * len(calls),
                    metrics=AgentLoopMetrics(generate_sequences=seconds, tool_calls=in_tools),
                    extra_fields={"turn_scores": [], "tool_rewards": []}
                    | ({"segment_ids": segment_ids} if trains else {})
                    | (about_group if i == 0 else {})
                    | engine.versions(),
                )
            )
        return outputs
