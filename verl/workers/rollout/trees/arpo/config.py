"""ARPO's and AEPO's keys, directly under actor_rollout_ref.rollout, by the authors' names."""

from dataclasses import dataclass

BRANCH_POLICY_NAMES = ("entropy", "entropy_balanced", "threshold", "never")  # functions of branching.py


@dataclass
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
    turn_delimiter: str = "\n\n"
    max_turn_tokens: int = 256
    turn_limit: int = 3

    def __post_init__(self):
        if self.branch_policy not in BRANCH_POLICY_NAMES:
            names = ", ".join(BRANCH_POLICY_NAMES)
            raise ValueError(f"actor_rollout_ref.rollout.branch_policy={self.branch_policy}: expected one of {names}")
        if self.enable_dynamic_rollouts and self.branch_policy == "never":
            raise ValueError("actor_rollout_ref.rollout.enable_dynamic_rollouts needs a branch_policy other than never")
        for name, low in (("initial_rollouts", 1), ("beam_size", 1), ("entropy_tokens", 1), ("entropy_top_k", 1)):
            _check(name, getattr(self, name), low)
        if not self.turn_delimiter:
            raise ValueError("actor_rollout_ref.rollout.turn_delimiter='': expected a text that ends a turn")
        _check("max_turn_tokens", self.max_turn_tokens, 1)
        _check("turn_limit", self.turn_limit, 0)
        _check("branch_probability", self.branch_probability, 0, 1)
        _check("branch_penalty", self.branch_penalty, 0, 1)
        _check("entropy_weight", self.entropy_weight, 0)
        _check("dynamic_rollouts_beta", self.dynamic_rollouts_beta, 0)


def _check(name: str, value: float, low: float, high: float | None = None) -> None:
    if value < low or (high is not None and value > high):
        expected = f"at least {low}" if high is None else f"a number from {low} to {high}"
        raise ValueError(f"actor_rollout_ref.rollout.{name}={value}: expected {expected}")
