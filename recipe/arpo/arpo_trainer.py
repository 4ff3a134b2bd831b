"""ARPO's and AEPO's training step: upstream's with trees, and what depends on the whole batch computed once.

One step, what is theirs marked with *:

    generate                      tool rollout; each trajectory's extra_fields["segment_ids"] names its tree segments
    old log-probs, entropies    * actor.enable_entropy_balanced_advantage: standardised entropy goes with the tokens
    advantages                  * algorithm.adv_estimator=arpo_hard (grpo: soft): means over shared segments
    update the actor            * policy_loss.loss_mode=aepo: balanced clipping and advantage
"""

from functools import partial

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import masked_mean

from recipe.common.token_fields import old_policy_entropy, put_token_field, require_old_policy_pass
from recipe.common.tree_trainer import TreeTrainer
from verl.trainer.ppo.aepo_algos import (
    SEGMENT_IDS,
    STANDARDISED_ENTROPY,
    mean_over_segments,
    standardise_entropy,
    trajectory_advantages,
)
from verl.trainer.ppo.v1 import register_trainer
from verl.workers.utils.aepo_losses import aepo_ppo_loss


def pad_segment_ids(keys: list[str], lengths: list[int], extras: dict[str, dict]) -> torch.Tensor:
    """The rollout's `segment_ids` as one tensor (B, T), -1 where there is none.

    Args:
        keys: the rows.
        lengths: response tokens of each.
        extras: the rollout's extra fields by key; a row without any is padding.

    Raises:
        ValueError: a row has no `segment_ids`, or not one for each response token.
    """
    padded = torch.full((len(keys), max(lengths, default=0)), -1)
    for row, (key, length) in enumerate(zip(keys, lengths, strict=True)):
        if key not in extras:
            continue
        ids = extras[key].get(SEGMENT_IDS.name)
        if ids is None:
            raise ValueError(f"{SEGMENT_IDS.needed_by} needs a rollout that names segments: {key} has no segment_ids")
        if len(ids) != length:
            raise ValueError(f"segment_ids of {key}: {len(ids)} for {length} response tokens")
        padded[row, :length] = torch.as_tensor(ids)
    return padded


@register_trainer("arpo")
class ARPOTrainer(TreeTrainer):
    """`trainer.v1.trainer_mode=arpo`."""

    def __init__(self, config: DictConfig):
        self.balances_advantage = config.actor_rollout_ref.actor.enable_entropy_balanced_advantage
        if self.balances_advantage:
            require_old_policy_pass(config, "actor.enable_entropy_balanced_advantage")
        super().__init__(config)

    def _setup(self):
        super()._setup()
        if self.balances_advantage:
            actor_config = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(partial(aepo_ppo_loss, config=actor_config))

    def _compute_old_log_prob(self, batch, metrics: dict):
        batch = super()._compute_old_log_prob(batch, metrics)
        if not self.balances_advantage:
            return batch
        entropy, mask, nested_mask = old_policy_entropy(batch)
        standardised, moments = standardise_entropy(entropy, mask)
        metrics.update({f"aepo/entropy_{name}": value for name, value in moments._asdict().items()})
        metrics["aepo/advantage_grew"] = masked_mean((standardised > 0).float(), mask).item()
        return put_token_field(batch, STANDARDISED_ENTROPY.name, standardised, nested_mask)

    def _compute_advantage(self, batch, metrics: dict):
        _, extras = self._fetch_extras(batch)
        hard = self.config.algorithm.adv_estimator == "arpo_hard"
        if not hard and not any(SEGMENT_IDS.name in extra for extra in extras.values()):
            return super()._compute_advantage(batch, metrics)
        mask = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["response_mask"])
        lengths = mask["response_mask"].offsets().diff().tolist()
        segment_ids = pad_segment_ids(batch.keys, lengths, extras)
        with SEGMENT_IDS.given(segment_ids):
            batch = super()._compute_advantage(batch, metrics)
        metrics.update(self._segment_metrics(batch, segment_ids))
        return batch

    def _segment_metrics(self, batch, segment_ids: torch.Tensor) -> dict[str, float]:
        """Over the model's tokens: share of shared ones, and mean |hard - soft| advantage, whichever is trained on."""
        rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        fields = ["uid", rewards, "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        index = np.array(list(data["uid"]), dtype=object)
        data = data.exclude("uid").to_padded_tensor()
        norm = self.config.algorithm.get("norm_adv_by_std_in_grpo", True)
        soft, groups = trajectory_advantages(data[rewards], index, norm_adv_by_std_in_grpo=norm)
        hard, passing = mean_over_segments(soft, segment_ids, groups)
        mask = data["response_mask"]
        return {
            "arpo/shared_tokens": masked_mean((passing > 1).float(), mask).item(),
            "arpo/hard_minus_soft": masked_mean((hard - soft.unsqueeze(-1)).abs(), mask).item(),
        }
