"""What all rollouts of this project add to verl's typed rollout config: a time limit, and how tokens are sampled."""

from dataclasses import dataclass

from verl.workers.config import RolloutConfig

LOGITS_PROCESSOR = "vllm_patches.adaptive_temperature:AdaptiveTemperature"


@dataclass
class GroupRolloutConfig(RolloutConfig):
    """Upstream's rollout config and keys under actor_rollout_ref.rollout.

    Args:
        group_timeout: seconds for all trajectories of a prompt, after which the group fails; None: no limit.
        adaptive_temperature: HAPO: sample training rollouts at T (1 + temperature_tau h); never validation.
        temperature_tau: in [0, 1); 0 is off.
    """

    group_timeout: float | None = None
    adaptive_temperature: bool = False
    temperature_tau: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        section = "actor_rollout_ref.rollout"
        if not 0 <= self.temperature_tau < 1:
            raise ValueError(f"{section}.temperature_tau={self.temperature_tau}: expected a number in [0, 1)")
        if not self.adaptive_temperature:
            return
        if self.temperature != 1:
            raise ValueError(
                f"{section}.adaptive_temperature needs {section}.temperature=1, not {self.temperature}: the "
                "statistics are of entropies at that temperature, the sampler's entropies of raw logits"
            )
        processors = (self.engine_kwargs or {}).get("vllm", {}).get("logits_processors") or []
        if LOGITS_PROCESSOR not in processors:
            raise ValueError(
                f"{section}.adaptive_temperature needs {LOGITS_PROCESSOR} in engine_kwargs.vllm.logits_processors"
            )
