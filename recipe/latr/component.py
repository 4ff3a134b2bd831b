"""LATR in the trainer: thresholds that follow the results of the last step's branches."""

from omegaconf import DictConfig

from recipe.latr.keys import KTConfig, Tightened, next_tightened_steps
from recipe.latr.tree import Policy
from verl.trainer.ppo.v1.batch_rows import BatchRows
from verl.trainer.ppo.v1.component import Component, tree_of
from verl.trainer.ppo.v1.tree_reports import tree_metrics
from verl.utils.parts import register_component
from verl.workers.rollout.prompt_task import PromptSettings


@register_component
class ThresholdScheduler(Component):
    """LATR's `kt.enable_param_scheduler`: tightens or loosens thresholds by the results of the last step's branches.
    Its state is the number of steps by which they are tightened (negative: loosened)."""

    state_file = "kt.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.kt: KTConfig = Policy.part.read(config)
        self.tightened_steps = 0

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return tree_of(config) == "latr"

    def step_settings(self, trainer) -> PromptSettings:
        return PromptSettings(tree=(Tightened(self.tightened_steps),))

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        if self.kt.enable_param_scheduler and "tree/suppress_ratio" in (means := tree_metrics(rows)):
            ratios = means["tree/suppress_ratio"], means["tree/empty_branch_ratio"]
            self.tightened_steps = next_tightened_steps(self.kt, self.tightened_steps, *ratios)
            metrics["tree/tightened_steps"] = self.tightened_steps

    def state_dict(self) -> dict | None:
        return {"tightened_steps": self.tightened_steps}

    def load_state_dict(self, state: dict) -> None:
        self.tightened_steps = state["tightened_steps"]
