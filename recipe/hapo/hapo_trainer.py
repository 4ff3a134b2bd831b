"""HAPO's training step: upstream's synchronous trainer, with the batch's entropies looked at once.

One step, what is HAPO's marked with *:

    generate                    * prompts carry the last step's statistics -> adaptive temperature in vLLM
    old log-probs, entropies    * h and statistics over the whole batch; h goes with the tokens
    advantages                    adv_estimator=hapo
    update the actor            * loss_mode=hapo looks up h
    save a checkpoint           * hapo.json: the statistics, for the first step after a resume
"""

from functools import partial

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.utils.padding import response_to_nested

from recipe.common.trainer_state import load_state, save_state
from verl.trainer.ppo.hapo_algos import (
    EntropyStatistics,
    compute_entropy_h,
    entropy_to_h,
    token_level_group_advantage,
)
from verl.trainer.ppo.v1 import register_trainer
from verl.trainer.ppo.v1.agent_loop_hapo import ADAPTIVE_TEMPERATURE
from verl.utils import tensordict_utils as tu
from verl.workers.utils.hapo_losses import ENTROPY_H, hapo_ppo_loss

STATISTICS_FILE = "hapo.json"


@register_trainer("hapo")
class HAPOTrainer(PPOTrainerSync):
    """`trainer.v1.trainer_mode=hapo`.

    `statistics` are the last training step's, None before the first.
    """

    def __init__(self, config: DictConfig):
        config = config.copy()
        if OmegaConf.select(config, "algorithm.rollout_correction.bypass_mode"):
            key = "algorithm.rollout_correction.bypass_mode"
            raise ValueError(f"{key}=true skips the pass that computes the entropies, which HAPO needs")
        config.trainer.v1.trainer_mode = "sync"  # upstream asks for this name to choose buffer and checkpoint format
        super().__init__(config)
        self.statistics: EntropyStatistics | None = None

    def _setup(self):
        super()._setup()
        actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
        if actor_config.adaptive_clip or actor_config.adaptive_advantage:
            self.actor_rollout_wg.set_loss_fn(partial(hapo_ppo_loss, config=actor_config))

    # ---- sampling ----

    @property
    def temperature_tau(self) -> float:
        """0 where the next rollouts sample the ordinary way."""
        rollout = self.config.actor_rollout_ref.rollout
        return rollout.temperature_tau if rollout.adaptive_temperature and self.statistics is not None else 0.0

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        if self.temperature_tau:
            settings = {"temperature_tau": self.temperature_tau, **self.statistics._asdict()}
            tu.assign_non_tensor_data(batch, ADAPTIVE_TEMPERATURE, settings)
        return super()._submit_batch_to_rollout(batch)

    # ---- statistics ----

    def _compute_old_log_prob(self, batch, metrics: dict):
        batch = super()._compute_old_log_prob(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=["entropy", "response_mask"]
        )
        nested_mask = data["response_mask"]
        data = data.to_padded_tensor()
        entropy, mask = data["entropy"], data["response_mask"].bool()
        if self.temperature_tau:
            # of this step's rollouts, which the last step's statistics tempered
            h = entropy_to_h(entropy, self.statistics)[mask]
            metrics["hapo/temperature_mean"] = (
                self.config.actor_rollout_ref.rollout.temperature * (1 + self.temperature_tau * h).mean().item()
            )
        h, self.statistics = compute_entropy_h(entropy, mask, self.config.actor_rollout_ref.actor.entropy_pivot)
        metrics["hapo/high_entropy_share"] = (h[mask] > 0).float().mean().item()
        metrics["hapo/low_entropy_share"] = (h[mask] < 0).float().mean().item()
        metrics.update({f"hapo/entropy_{name}": value for name, value in self.statistics._asdict().items()})
        fields = TensorDict({ENTROPY_H: response_to_nested(h, nested_mask)}, batch_size=len(batch))
        return tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)

    def _compute_advantage(self, batch, metrics: dict):
        batch = super()._compute_advantage(batch, metrics)
        if self.config.algorithm.adv_estimator == "hapo":
            metrics["hapo/grpo_fallback_share"] = self._fallback_share(batch)
        return batch

    def _fallback_share(self, batch) -> float:
        """Share of the groups whose advantage is GRPO's."""
        fields = ["uid", "rm_scores", "response_mask"]
        keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding", False)]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=fields)
        _, groups = np.unique(list(data["uid"]), return_inverse=True)
        data = data.exclude("uid").to_padded_tensor()
        scores, lengths = data["rm_scores"].sum(dim=-1), data["response_mask"].sum(dim=-1)
        norm = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        _, fallback = token_level_group_advantage(
            scores, lengths, torch.from_numpy(groups), norm_adv_by_std_in_grpo=norm
        )
        return fallback.float().mean().item()

    # ---- checkpoint ----

    def _save_checkpoint(self):
        if self.statistics is not None:
            save_state(self, STATISTICS_FILE, self.statistics._asdict())
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if state := load_state(self, STATISTICS_FILE):
            self.statistics = EntropyStatistics(**state)
