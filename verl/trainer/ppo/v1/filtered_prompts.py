"""The additions of `algorithm.filter_groups` to upstream's synchronous trainer."""

from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from verl.trainer.ppo.v1.prompt_supply import PromptSupply
from verl.trainer.ppo.v1.trainer_state import load_state, save_state
from verl.trainer.ppo.v1.tree_buffer import TreeBuffer, buffer_options
from verl.workers.config.schedule import filters_groups

STATE_FILE = "prompts.pkl"


class FilteredPrompts(PPOTrainer):
    """Mixin of synchronous trainers, which fill a batch by `TreeBuffer` if the config has `algorithm.filter_groups`."""

    supply: PromptSupply | None = None

    def _build_replay_buffer(self):
        config = self.config
        if not filters_groups(config) or OmegaConf.select(config, "trainer.v1.sampler.custom_sampler.path"):
            return super()._build_replay_buffer()
        filters, self.supply = config.algorithm.filter_groups, PromptSupply(super()._fetch_one_gen_batch)
        return TreeBuffer(
            **buffer_options(self),
            supply=self.supply,
            train_batch_size=config.data.train_batch_size,
            gen_batch_size=1,
            max_inflight_gen_batches=filters.get("max_inflight_gen_batches") or 1,
            max_num_gen_batches=filters.get("max_num_gen_batches") or 0,
        )

    def _fetch_one_gen_batch(self) -> TensorDict:
        return self.supply.next() if self.supply else super()._fetch_one_gen_batch()

    def _save_checkpoint(self):
        if self.supply:
            save_state(self, STATE_FILE, {"kept": self.supply.kept, "shares": self.supply.shares})
        super()._save_checkpoint()

    def _load_checkpoint(self):
        super()._load_checkpoint()
        if self.supply and (state := load_state(self, STATE_FILE)):
            self.supply.kept, self.supply.shares = state["kept"], state["shares"]
