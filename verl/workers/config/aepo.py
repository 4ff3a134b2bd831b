"""AEPO's keys in verl's typed actor config; the recipe's YAML names these classes as `_target_`."""

from dataclasses import dataclass

from verl.workers.config import FSDPActorConfig


@dataclass
class AEPOActorConfig(FSDPActorConfig):
    """Upstream's FSDP actor config and AEPO's keys under actor_rollout_ref.actor.

    Args:
        enable_entropy_balanced_clipping: tokens above the upper clip keep a gradient.
        enable_entropy_balanced_advantage: advantages grow with the standardised entropy z.
        entropy_advantage_coef: how far: A (1 + entropy_advantage_coef z), from 0 to 1.
    """

    enable_entropy_balanced_clipping: bool = False
    enable_entropy_balanced_advantage: bool = False
    entropy_advantage_coef: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        section = "actor_rollout_ref.actor"
        if not 0.0 <= self.entropy_advantage_coef <= 1.0:
            raise ValueError(
                f"{section}.entropy_advantage_coef={self.entropy_advantage_coef}: expected a number from 0.0 to 1.0"
            )
        switches = ("enable_entropy_balanced_clipping", "enable_entropy_balanced_advantage")
        on = [name for name in switches if getattr(self, name)]
        if on and self.policy_loss.loss_mode != "aepo":
            raise ValueError(
                f"{section}.policy_loss.loss_mode={self.policy_loss.loss_mode} does not know {' and '.join(on)}: "
                "set it to aepo, or the switch to false"
            )
