"""The losses' keys in verl's typed actor config; the recipes' YAML names this class as `_target_`."""

from dataclasses import dataclass

from verl.workers.config import FSDPActorConfig

SECTION = "actor_rollout_ref.actor"
# switch -> the policy_loss.loss_mode that knows it
LOSS_OF = {
    "adaptive_clip": "hapo",
    "adaptive_advantage": "hapo",
    "enable_entropy_balanced_clipping": "aepo",
    "enable_entropy_balanced_advantage": "aepo",
}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{SECTION}.{name}={value}: expected a number from {low} to {high}")


@dataclass
class ExploreActorConfig(FSDPActorConfig):
    """Upstream's FSDP actor config, and what HAPO's and AEPO's losses add under actor_rollout_ref.actor.

    Args:
        adaptive_clip: HAPO: clip ranges follow each token's normalised entropy h.
        clip_alpha: how far: eps (1 + clip_alpha |h|).
        adaptive_advantage: HAPO: redistribute advantages by h.
        adv_beta: how far: A (1 + adv_beta h); at most 1, so that no advantage changes its sign.
        entropy_pivot: HAPO: quantile of the batch's log-entropies where h is 0.
        enable_entropy_balanced_clipping: AEPO: tokens above the upper clip keep a gradient.
        enable_entropy_balanced_advantage: AEPO: advantages grow with the standardised entropy z.
        entropy_advantage_coef: how far: A (1 + entropy_advantage_coef z), from 0 to 1.
    """

    adaptive_clip: bool = False
    clip_alpha: float = 1.0
    adaptive_advantage: bool = False
    adv_beta: float = 1.0
    entropy_pivot: float = 0.8
    enable_entropy_balanced_clipping: bool = False
    enable_entropy_balanced_advantage: bool = False
    entropy_advantage_coef: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        _check_range("entropy_pivot", self.entropy_pivot, 0.0, 1.0)
        _check_range("adv_beta", self.adv_beta, 0.0, 1.0)
        _check_range("entropy_advantage_coef", self.entropy_advantage_coef, 0.0, 1.0)
        low = self.clip_ratio_low if self.clip_ratio_low is not None else self.clip_ratio
        if self.adaptive_clip and (self.clip_alpha < 0 or low * (1 + self.clip_alpha) >= 1):
            raise ValueError(
                f"{SECTION}.clip_alpha={self.clip_alpha}: expected at least 0, and clip_ratio_low (1 + clip_alpha) "
                f"below 1, else nothing is clipped; clip_ratio_low is {low}"
            )
        mode = self.policy_loss.loss_mode
        if ignored := [switch for switch, loss in LOSS_OF.items() if getattr(self, switch) and loss != mode]:
            raise ValueError(
                f"{SECTION}.policy_loss.loss_mode={mode} does not know {' and '.join(ignored)}: "
                f"set it to {LOSS_OF[ignored[0]]}, or the switch to false"
            )
