"""LATR's keys in verl's typed rollout config; the recipe's YAML names this class as `_target_`."""

from dataclasses import dataclass, field

from verl.workers.config.group_rollout import GroupRolloutConfig
from verl.workers.rollout.trees.latr.config import KTConfig


@dataclass
class KTRolloutConfig(GroupRolloutConfig):
    """Upstream's rollout config with `actor_rollout_ref.rollout.kt`; used with `rollout.name=kt`."""

    _mutable_fields = GroupRolloutConfig._mutable_fields | {"kt"}

    kt: KTConfig = field(default_factory=KTConfig)

    def __post_init__(self):
        super().__post_init__()
        if not isinstance(self.kt, KTConfig):
            known = set(KTConfig.__dataclass_fields__)
            unknown = sorted(set(self.kt) - known)
            if unknown:
                raise ValueError(
                    f"actor_rollout_ref.rollout.kt has no key {', '.join(unknown)}; known: {sorted(known)}"
                )
            self.kt = KTConfig(**dict(self.kt))
        plain = self.temperature == 1 and self.top_p == 1 and self.top_k in (-1, 0)
        if self.name == "kt" and self.kt.sample_nk != "none" and not plain:
            raise ValueError(
                f"actor_rollout_ref.rollout.kt.sample_nk={self.kt.sample_nk} needs temperature=1, top_p=1, top_k=-1: "
                "the server reports candidates after them, and branches open by raw probabilities"
            )
        if self.name == "kt" and not self.kt.fill_return_sequences:
            key = "actor_rollout_ref.rollout.kt.fill_return_sequences"
            raise ValueError(f"{key}=false: training needs rollout.n responses of every prompt")
