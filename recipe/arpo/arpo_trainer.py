"""ARPO's and AEPO's training step: upstream's with trees, and what depends on the whole batch computed once.

One step, what is theirs marked with *:

    generate                      tool rollout
    old log-probs, entropies    * actor.enable_entropy_balanced_advantage: standardised entropy goes with the tokens
    advantages                    algorithm.adv_estimator=arpo_hard (grpo: soft), see `recipe.common.tree_trainer`
    update the actor            * policy_loss.loss_mode=aepo: balanced clipping and advantage
"""

from functools import partial

from omegaconf import DictConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_functional import masked_mean

from recipe.common.token_fields import old_policy_entropy, put_token_field, require_old_policy_pass
from recipe.common.tree_trainer import TreeTrainer
from verl.trainer.ppo.aepo_algos import STANDARDISED_ENTROPY, standardise_entropy
from verl.trainer.ppo.v1 import register_trainer
from verl.workers.utils.aepo_losses import aepo_ppo_loss


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
