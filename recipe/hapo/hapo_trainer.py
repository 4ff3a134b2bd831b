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
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.config import omega_conf_to_dataclass

from recipe.common.token_fields import old_policy_entropy, put_token_field, real_keys, require_old_policy_pass
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
        require_old_policy_pass(config, "HAPO")
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
        entropy, mask, nested_mask = old_policy_entropy(batch)
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
        return put_token_field(batch, ENTROPY_H, h, nested_mask)

    def _compute_advantage(self, batch, metrics: dict):
        batch = super()._compute_advantage(batch, metrics)
        if self.config.algorithm.adv_estimator == "hapo":
            metrics["hapo/grpo_fallback_share"] = self._fallback_share(batch)
        return batch

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

    # ---- checkpoint ----

    def _save_checkpoint(self):
        if self.statistics is not None:
            save_state(self, STATISTICS_FILE, self.statistics._asdict())
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if state := load_state(self, STATISTICS_FILE):
            self.statistics = EntropyStatistics(**state)
