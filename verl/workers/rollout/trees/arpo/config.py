"""ARPO's and AEPO's keys, directly under actor_rollout_ref.rollout, by the authors' names."""

from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.workers.config.keys import ROLLOUT, STRICT


@dataclass(frozen=True, config=STRICT)
class ARPOConfig:
    """ARPO's and AEPO's branching.

    Args:
        initial_rollouts: trajectories that start from the prompt; the others branch off, or fill up.
        beam_size: branches after a fork, the trajectory itself among them.
        branch_probability, entropy_weight: see branching.py.
        branch_policy: `entropy` (ARPO), `entropy_balanced` (AEPO), `threshold` or `never`.
        branch_penalty: AEPO's, for each fork in a row.
        entropy_tokens: so many tokens are looked at after the prompt and after a result.
        entropy_top_k: the entropy of each is estimated from so many most likely tokens; vLLM allows 20 unless
            engine_kwargs.vllm.max_logprobs says more.
        enable_dynamic_rollouts: AEPO's budget, initial_rollouts from a probe trajectory's entropies.
        dynamic_rollouts_beta: its beta.
        turn_delimiter, max_turn_tokens: without tools, a text that ends a turn, and its most tokens.
        turn_limit: without tools, turns after which a trajectory decides about a fork; what follows is one last turn.
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
