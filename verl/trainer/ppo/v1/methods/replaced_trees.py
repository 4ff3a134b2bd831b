"""Group filtering for HATO's trees: a dropped tree is replaced by one other tree."""

from omegaconf import DictConfig

from verl.trainer.checks.hato import filters_groups
from verl.trainer.ppo.v1.component import Component, tree_of
from verl.trainer.ppo.v1.tree_buffer import TreeBuffer, buffer_options
from verl.utils.parts import register_component


@register_component
class ReplacedTrees(Component):
    """Component for `algorithm.filter_groups` with tree=hato; with `schedule=sync` it replaces upstream's buffer by
    `TreeBuffer`, which shows groups without a signal to the components and replaces them one by one."""

    @classmethod
    def wanted(cls, config: DictConfig) -> bool:
        return filters_groups(config) and tree_of(config) == "hato"

    def replay_buffer(self, trainer) -> TreeBuffer | None:
        if trainer.trainer_mode != "sync":
            return None  # asynchronous runs always have an `AsyncTreeBuffer`
        bound = trainer.config.algorithm.filter_groups.get("max_num_gen_batches", 0)
        options = buffer_options(trainer)
        batch_size = trainer.config.data.train_batch_size
        return TreeBuffer(**options, train_batch_size=batch_size, gen_batch_size=1, max_num_gen_batches=bound)
