"""HAPO's keys in verl's typed actor and rollout configs; the recipe's YAML names these classes as `_target_`."""

from dataclasses import dataclass

from verl.workers.config import FSDPActorConfig, RolloutConfig

LOGITS_PROCESSOR = "vllm_patches.adaptive_temperature:AdaptiveTemperature"


def _check_range(section: str, name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{section}.{name}={value}: expected a number from {low} to {high}")


@dataclass
class HAPOActorConfig(FSDPActorConfig):
    """Upstream's FSDP actor config and HAPO's keys under actor_rollout_ref.actor.

    Args:
        adaptive_clip: clip ranges follow each token's normalised entropy h.
        clip_alpha: how far: eps (1 + clip_alpha |h|).
        adaptive_advantage: redistribute advantages by h.
        adv_beta: how far: A (1 + adv_beta h); at most 1, so that no advantage changes its sign.
        entropy_pivot: quantile of the batch's log-entropies where h is 0.
    """

    adaptive_clip: bool = True
    clip_alpha: float = 1.0
    adaptive_advantage: bool = True
    adv_beta: float = 1.0
    entropy_pivot: float = 0.8

    def __post_init__(self):
        super().__post_init__()
        section = "actor_rollout_ref.actor"
        _check_range(section, "entropy_pivot", self.entropy_pivot, 0.0, 1.0)
        _check_range(section, "adv_beta", self.adv_beta, 0.0, 1.0)
        low = self.clip_ratio_low if self.clip_ratio_low is not None else self.clip_ratio
        if self.clip_alpha < 0 or low * (1 + self.clip_alpha) >= 1:
            raise ValueError(
                f"{section}.clip_alpha={self.clip_alpha}: expected at least 0, and clip_ratio_low (1 + clip_alpha) "
                f"below 1, else nothing is clipped; clip_ratio_low is {low}"
            )
        if (self.adaptive_clip or self.adaptive_advantage) and self.policy_loss.loss_mode != "hapo":
            raise ValueError(
                f"{section}.policy_loss.loss_mode={self.policy_loss.loss_mode} knows neither adaptive_clip nor "
                "adaptive_advantage: set it to hapo, or both to false"
            )


@dataclass
class HAPORolloutConfig(RolloutConfig):
    """Upstream's rollout config and HAPO's keys under actor_rollout_ref.rollout.

    Args:
        adaptive_temperature: sample training rollouts at T (1 + temperature_tau h); never validation.
        temperature_tau: in [0, 1); 0 is off.
    """

    adaptive_temperature: bool = True
    temperature_tau: float = 0.05

    def __post_init__(self):
        super().__post_init__()
        section = "actor_rollout_ref.rollout"
        if not 0 <= self.temperature_tau < 1:
            raise ValueError(f"{section}.temperature_tau={self.temperature_tau}: expected a number in [0, 1)")
        if not self.adaptive_temperature:
            return
        if self.name != "vllm":
            raise ValueError(f"{section}.adaptive_temperature works with {section}.name=vllm, not {self.name}")
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
