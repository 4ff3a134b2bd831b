"""ARPO's and AEPO's keys in verl's typed rollout config; the recipe's YAML names this class as `_target_`."""

import warnings
from dataclasses import dataclass, field, fields

from verl.workers.config.group_rollout import GroupRolloutConfig
from verl.workers.rollout.tools.tool_box import ToolsConfig
from verl.workers.rollout.trees.arpo.config import ToolTreeConfig

MODE = "sync_with_tool"


@dataclass
class ToolRolloutConfig(GroupRolloutConfig):
    """Upstream's rollout config with the keys of `ToolTreeConfig`, and `tools` (`ToolsConfig`).

    `mode` is the authors' name for rollouts with tools; here, as everywhere in verl by now, the engine is asynchronous.
    """

    _mutable_fields = GroupRolloutConfig._mutable_fields | {"tools"}

    mode: str = MODE
    initial_rollouts: int = 8
    beam_size: int = 2
    branch_probability: float = 0.5
    entropy_weight: float = 0.2
    branch_policy: str = "entropy"
    branch_penalty: float = 0.05
    entropy_tokens: int = 20
    entropy_top_k: int = 20
    enable_dynamic_rollouts: bool = False
    dynamic_rollouts_beta: float = 0.5
    tools: ToolsConfig = field(default_factory=ToolsConfig)

    def __post_init__(self):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unknown rollout mode")
            super().__post_init__()
        if not isinstance(self.tools, ToolsConfig):
            known = {one.name for one in fields(ToolsConfig)}
            unknown = sorted(set(self.tools) - known)
            if unknown:
                raise ValueError(
                    f"actor_rollout_ref.rollout.tools has no key {', '.join(unknown)}; known: {sorted(known)}"
                )
            self.tools = ToolsConfig(**dict(self.tools))
        self.tree_config()
        if self.mode != MODE:
            return
        if self.name != "vllm":
            raise ValueError(f"actor_rollout_ref.rollout.mode={MODE} works with name=vllm, not {self.name}")
        if self.logprobs_mode not in ("processed_logprobs", "raw_logprobs"):
            raise ValueError(
                f"actor_rollout_ref.rollout.logprobs_mode={self.logprobs_mode}: expected processed_logprobs (entropies "
                "of what is sampled from) or raw_logprobs (at temperature 1)"
            )
        if not self.tools.tool_instances:
            raise ValueError(
                f"actor_rollout_ref.rollout.mode={MODE} needs actor_rollout_ref.rollout.tools.tool_instances"
            )
        for name, instance in self.tools.tool_instances.items():
            if (instance.get("params") or {}).get("api_key"):
                raise ValueError(
                    f"actor_rollout_ref.rollout.tools.tool_instances.{name}.params.api_key: upstream prints and logs "
                    "the whole config; leave the key out and export BRIGHTDATA_API_KEY on every node"
                )
        allowed = (self.engine_kwargs or {}).get("vllm", {}).get("max_logprobs", 20)
        if self.branch_policy != "never" and 0 <= allowed < self.entropy_top_k:
            raise ValueError(
                f"actor_rollout_ref.rollout.entropy_top_k={self.entropy_top_k}: vLLM reports at most {allowed}; raise "
                "engine_kwargs.vllm.max_logprobs"
            )

    def tree_config(self) -> ToolTreeConfig:
        """The keys that decide about trees, checked."""
        tools = {name: getattr(self.tools, name) for name in ("call_limit", "max_result_tokens")}
        names = {one.name for one in fields(ToolTreeConfig)} - tools.keys()
        return ToolTreeConfig(**tools, **{name: getattr(self, name) for name in names})
