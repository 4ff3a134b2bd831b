"""What methods do in a training step beside upstream's: components that `ExploreTrainer` calls at fixed places.

A component is wanted where the config has its mechanism, whatever else the run is made of: HAPO's h goes with the
tokens of any tree, LATR's scheduler with any loss. Its state goes with each checkpoint.
"""

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import masked_mean

from verl.trainer.ppo.aepo_algos import STANDARDISED_ENTROPY, standardise_entropy
from verl.trainer.ppo.hapo_algos import (
    ENTROPY_H,
    EntropyStatistics,
    compute_entropy_h,
    entropy_to_h,
    token_level_group_advantage,
)
from verl.trainer.ppo.v1.batch_rows import real_keys
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.trajectory_tree import ADAPTIVE_TEMPERATURE
from verl.workers.rollout.trees.latr.schedule import NOTCHES, next_notches


class Component:
    """Does nothing; a component overrides what it needs.

    Attributes:
        fields: names of the token fields that it makes for the loss.
        entropy_for: the mechanism, in a user's words, that needs the old policy's entropies; None: nothing does.
        state_file: its file in a checkpoint.
    """

    fields: tuple[str, ...] = ()
    entropy_for: str | None = None
    state_file: str | None = None

    def __init__(self, config: DictConfig):
        self.config = config

    @staticmethod
    def wanted(config: DictConfig) -> bool:
        """Whether a run with this config has the component."""
        raise NotImplementedError

    def before_rollout(self, batch: TensorDict) -> None:
        """Attach to the prompts what their rollouts must know."""

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        """`fields`, each (B, T), from the old policy's entropies (B, T) in nats and the tokens that count."""
        return {}

    def after_advantage(self, batch, metrics: dict) -> None:
        """Look at the batch, which has advantages by now, and at the step's metrics."""

    def state_dict(self) -> dict | None:
        """In JSON's types; None: nothing to keep."""

    def load_state_dict(self, state: dict) -> None:
        """What `state_dict` gave."""


class NormalisedEntropy(Component):
    """HAPO: h of every token for the loss, and its statistics, None before the first step, for the next sampling."""

    state_file = "hapo.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self.fields = (ENTROPY_H.name,) if actor.get("adaptive_clip") or actor.get("adaptive_advantage") else ()
        self.tau = rollout.temperature_tau if rollout.get("adaptive_temperature") else 0.0
        self.entropy_for = "HAPO" if self.fields or self.tau else None
        self.statistics: EntropyStatistics | None = None

    @staticmethod
    def wanted(config: DictConfig) -> bool:
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        mechanisms = actor.get("adaptive_clip"), actor.get("adaptive_advantage"), rollout.get("adaptive_temperature")
        return any(mechanisms) or config.algorithm.adv_estimator == "hapo"

    def before_rollout(self, batch: TensorDict) -> None:
        if self.tau and self.statistics is not None:
            settings = {"temperature_tau": self.tau, **self.statistics._asdict()}
            tu.assign_non_tensor_data(batch, ADAPTIVE_TEMPERATURE, settings)

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        if self.tau and self.statistics is not None:
            # of this step's rollouts, which the last step's statistics tempered
            h = entropy_to_h(entropy, self.statistics)[mask]
            temperature = self.config.actor_rollout_ref.rollout.temperature
            metrics["hapo/temperature_mean"] = temperature * (1 + self.tau * h).mean().item()
        pivot = self.config.actor_rollout_ref.actor.get("entropy_pivot", 0.8)
        h, self.statistics = compute_entropy_h(entropy, mask, pivot)
        metrics["hapo/high_entropy_share"] = (h[mask] > 0).float().mean().item()
        metrics["hapo/low_entropy_share"] = (h[mask] < 0).float().mean().item()
        metrics.update({f"hapo/entropy_{name}": value for name, value in self.statistics._asdict().items()})
        return {name: h for name in self.fields}

    def after_advantage(self, batch, metrics: dict) -> None:
        if self.config.algorithm.adv_estimator == "hapo":
            metrics["hapo/grpo_fallback_share"] = self._fallback_share(batch)

    def _fallback_share(self, batch) -> float:
        """Share of the groups whose advantage is GRPO's."""
        fields = ["uid", "rm_scores", "response_mask"]
        data = tq.kv_batch_get(keys=real_keys(batch), partition_id=batch.partition_id, select_fields=fields)
        _, groups = np.unique(list(data["uid"]), return_inverse=True)
        data = data.exclude("uid").to_padded_tensor()
        scores, lengths = data["rm_scores"].sum(dim=-1), data["response_mask"].sum(dim=-1)
        norm = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        _, fallback = token_level_group_advantage(
            scores, lengths, torch.from_numpy(groups), norm_adv_by_std_in_grpo=norm
        )
        return fallback.float().mean().item()

    def state_dict(self) -> dict | None:
        return self.statistics and self.statistics._asdict()

    def load_state_dict(self, state: dict) -> None:
        self.statistics = EntropyStatistics(**state)


class BalancedEntropy(Component):
    """AEPO: the standardised entropy of every token for the loss."""

    fields = (STANDARDISED_ENTROPY.name,)
    entropy_for = "actor.enable_entropy_balanced_advantage"

    @staticmethod
    def wanted(config: DictConfig) -> bool:
        return bool(config.actor_rollout_ref.actor.get("enable_entropy_balanced_advantage"))

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        standardised, moments = standardise_entropy(entropy, mask)
        metrics.update({f"aepo/entropy_{name}": value for name, value in moments._asdict().items()})
        metrics["aepo/advantage_grew"] = masked_mean((standardised > 0).float(), mask).item()
        return {STANDARDISED_ENTROPY.name: standardised}


class ThresholdScheduler(Component):
    """LATR: `kt.enable_param_scheduler` tightens or loosens the thresholds by what became of the last step's branches.

    Its state is one number, how many notches they are tightened (negative: loosened).
    """

    state_file = "kt.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.kt = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).kt
        self.notches = 0

    @staticmethod
    def wanted(config: DictConfig) -> bool:
        return config.actor_rollout_ref.rollout.name == "kt"

    def before_rollout(self, batch: TensorDict) -> None:
        if self.notches:
            tu.assign_non_tensor_data(batch, NOTCHES, self.notches)

    def after_advantage(self, batch, metrics: dict) -> None:
        if self.kt.enable_param_scheduler and "tree/suppress_ratio" in metrics:
            ratios = metrics["tree/suppress_ratio"], metrics["tree/empty_branch_ratio"]
            self.notches = next_notches(self.kt, self.notches, *ratios)
            metrics["tree/tightened_notches"] = self.notches

    def state_dict(self) -> dict | None:
        return {"tightened_notches": self.notches}

    def load_state_dict(self, state: dict) -> None:
        self.notches = state["tightened_notches"]


# a recipe appends its own in the module that its runs register
COMPONENTS: list[type[Component]] = [NormalisedEntropy, BalancedEntropy, ThresholdScheduler]


def components_of(config: DictConfig) -> list[Component]:
    """The components that a run with this config has.

    Raises:
        ValueError: one needs the old policy's entropies, and the run would skip the pass that computes them.
    """
    components = [component(config) for component in COMPONENTS if component.wanted(config)]
    key = "algorithm.rollout_correction.bypass_mode"
    for component in components:
        if component.entropy_for and OmegaConf.select(config, key):
            raise ValueError(
                f"{key}=true skips the pass that computes the entropies, which {component.entropy_for} needs"
            )
    return components
