"""HAPO in the trainer: h of every token, and the statistics of the last step for the tempered sampler."""

import torch
from omegaconf import DictConfig

from recipe.hapo.normalized_entropy import ENTROPY_H, EntropyStatistics, compute_entropy_h
from verl.trainer.ppo.v1.component import Component
from verl.utils.parts import register_component
from verl.workers.rollout.prompt_task import PromptSettings
from vllm_patches.entropy_temperature import normalize_entropy
from vllm_patches.tempered_requests import KEY


@register_component
class NormalizedEntropy(Component):
    """Component that computes h of every token for the loss, and the `EntropyStatistics` that define h in a batch. With
    `adaptive_temperature` the next step's sampler uses these statistics; the first step tempers nothing."""

    computes = (ENTROPY_H,)
    state_file = "hapo.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        rollout = config.actor_rollout_ref.rollout
        self.tau = rollout.temperature_tau if rollout.get("adaptive_temperature") else 0.0
        self.statistics: EntropyStatistics | None = None

    def step_settings(self, trainer) -> PromptSettings:
        if not self.tau or self.statistics is None:
            return PromptSettings()
        return PromptSettings(sampler={KEY: {"temperature_tau": self.tau, **self.statistics._asdict()}})

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        if self.tau and self.statistics is not None:
            # The sampler tempered this step's rollouts by the last step's statistics.
            h = normalize_entropy(entropy, *self.statistics)[mask & entropy.isfinite()]
            temperature = self.config.actor_rollout_ref.rollout.temperature
            metrics["hapo/temperature_mean"] = temperature * (1 + self.tau * h).mean().item()
        pivot = self.config.actor_rollout_ref.actor.get("entropy_pivot", 0.8)
        h, self.statistics = compute_entropy_h(entropy, mask, pivot)
        metrics["hapo/high_entropy_share"] = ((h > 0).sum() / mask.sum()).item()  # h is 0 outside the mask
        metrics["hapo/low_entropy_share"] = ((h < 0).sum() / mask.sum()).item()
        metrics.update({f"hapo/entropy_{name}": value for name, value in self.statistics._asdict().items()})
        return {ENTROPY_H.name: h}

    def state_dict(self) -> dict | None:
        return self.statistics and self.statistics._asdict()

    def load_state_dict(self, state: dict) -> None:
        self.statistics = EntropyStatistics(**state)
