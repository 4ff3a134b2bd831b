"""What methods do in a training step beside upstream's: components that `ExploreTrainer` calls at fixed places.

A component is wanted where the config has its mechanism, whatever else the run is made of: HAPO's h goes with the
tokens of any tree, LATR's scheduler with any loss. Its state goes with each checkpoint.
"""

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import masked_mean

from verl.trainer.ppo.loss.aepo import STANDARDISED_ENTROPY, standardise_entropy
from verl.trainer.ppo.loss.hapo import (
    ENTROPY_H,
    EntropyStatistics,
    compute_entropy_h,
    entropy_to_h,
    token_level_group_advantage,
)
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.trainer.ppo.v1.component import Component, tree_of
from verl.trainer.ppo.v1.hato_components import HATOCredit, HATOSearch, SuccessfulPaths
from verl.trainer.ppo.v1.meta_learning import MetaLearning
from verl.trainer.ppo.v1.tree_buffer import ReplacedTrees
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.trajectory_tree import ADAPTIVE_TEMPERATURE
from verl.workers.rollout.trees.latr.schedule import TIGHTENED_STEPS, next_tightened_steps


class NormalizedEntropy(Component):
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

    def before_rollout(self, batch: TensorDict, trainer) -> None:
        if self.tau and self.statistics is not None:
            settings = {"temperature_tau": self.tau, **self.statistics._asdict()}
            tu.assign_non_tensor_data(batch, ADAPTIVE_TEMPERATURE, settings)

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        if self.tau and self.statistics is not None:
            # of this step's rollouts, which the last step's statistics tempered
            h = entropy_to_h(entropy, self.statistics)[mask & entropy.isfinite()]
            temperature = self.config.actor_rollout_ref.rollout.temperature
            metrics["hapo/temperature_mean"] = temperature * (1 + self.tau * h).mean().item()
        pivot = self.config.actor_rollout_ref.actor.get("entropy_pivot", 0.8)
        h, self.statistics = compute_entropy_h(entropy, mask, pivot)
        metrics["hapo/high_entropy_share"] = (h[mask] > 0).float().mean().item()
        metrics["hapo/low_entropy_share"] = (h[mask] < 0).float().mean().item()
        metrics.update({f"hapo/entropy_{name}": value for name, value in self.statistics._asdict().items()})
        return {name: h for name in self.fields}

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        if self.config.algorithm.adv_estimator == "hapo":
            metrics["hapo/grpo_fallback_share"] = self._fallback_share(rows)

    def _fallback_share(self, rows: BatchRows) -> float:
        """Share of the groups whose advantage is GRPO's."""
        _, groups = np.unique(rows.index[rows.real], return_inverse=True)
        scores, lengths = rows.rewards[rows.real].sum(dim=-1), rows.response_mask[rows.real].sum(dim=-1)
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

    Its state is one number, how many steps they are tightened (negative: loosened).
    """

    state_file = "kt.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.kt = omega_conf_to_dataclass(config.actor_rollout_ref.rollout).kt
        self.tightened_steps = 0

    @staticmethod
    def wanted(config: DictConfig) -> bool:
        return tree_of(config) == "latr"

    def before_rollout(self, batch: TensorDict, trainer) -> None:
        if self.tightened_steps:
            tu.assign_non_tensor_data(batch, TIGHTENED_STEPS, self.tightened_steps)

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        if self.kt.enable_param_scheduler and "tree/suppress_ratio" in metrics:
            ratios = metrics["tree/suppress_ratio"], metrics["tree/empty_branch_ratio"]
            self.tightened_steps = next_tightened_steps(self.kt, self.tightened_steps, *ratios)
            metrics["tree/tightened_steps"] = self.tightened_steps

    def state_dict(self) -> dict | None:
        return {"tightened_steps": self.tightened_steps}

    def load_state_dict(self, state: dict) -> None:
        self.tightened_steps = state["tightened_steps"]


# a recipe appends its own in the module that its runs register
COMPONENTS: list[type[Component]] = [
    *(NormalizedEntropy, BalancedEntropy, ThresholdScheduler),
    *(ReplacedTrees, HATOCredit, HATOSearch, SuccessfulPaths, MetaLearning),
]


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
