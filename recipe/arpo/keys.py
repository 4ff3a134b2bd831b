"""ARPO's and AEPO's keys, directly under actor_rollout_ref.rollout, by the authors' names."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.workers.config.keys import ROLLOUT, STRICT


@dataclass(frozen=True, config=STRICT)
class ARPOConfig:
    """Settings of ARPO's and AEPO's branching.

    Args:
        initial_rollouts: number of trajectories that first start from the prompt; others branch off or fill the group.
        beam_size: number of branches after a fork, including the trajectory itself.
        branch_probability, entropy_weight: see branching.py.
        branch_policy: rule for forks: `entropy` (ARPO), `entropy_balanced` (AEPO), `threshold` or `never`.
        branch_penalty: AEPO's penalty for each consecutive fork.
        entropy_tokens: number of tokens after the prompt, and after a result, whose mean entropy is taken.
        entropy_top_k: number of most likely tokens from which each entropy is estimated; vLLM allows at most 20 unless
            engine_kwargs.vllm.max_logprobs is larger.
        enable_dynamic_rollouts: whether initial_rollouts is computed from a probe trajectory's entropies (AEPO).
        dynamic_rollouts_beta: coefficient beta of that computation (branching.py).
        turn_delimiter, max_turn_tokens: text that ends a turn without tools, and the largest number of its tokens.
        turn_limit: number of turns without tools after each of which a trajectory may fork; one last turn follows.
    """

    initial_rollouts: int = Field(default=8, ge=1)
    beam_size: int = Field(default=2, ge=1)
    branch_probability: float = Field(default=0.5, ge=0, le=1)
    entropy_weight: float = Field(default=0.2, ge=0)
    branch_policy: Literal["entropy", "entropy_balanced", "threshold", "never"] = "entropy"
    branch_penalty: float = Field(default=0.05, ge=0, le=1)
    entropy_tokens: int = Field(default=20, ge=1)
    entropy_top_k: int = Field(default=20, ge=1)
    enable_dynamic_rollouts: bool = False
    dynamic_rollouts_beta: float = Field(default=0.5, ge=0)
    turn_delimiter: str = Field(default="\n\n", min_length=1)
    max_turn_tokens: int = Field(default=256, ge=1)
    turn_limit: int = Field(default=3, ge=0)

    def __post_init__(self):
        if self.enable_dynamic_rollouts and self.branch_policy == "never":
            raise ValueError(f"{ROLLOUT}.enable_dynamic_rollouts needs a branch_policy other than never")
