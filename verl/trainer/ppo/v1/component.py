"""What a method does in a training step beside upstream's: a component, which the trainer calls at fixed places."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from omegaconf import DictConfig

from verl.trainer.ppo.v1.batch_rows import BatchRows, Group
from verl.utils.parts import computed_fields, parts
from verl.utils.token_fields import ContextValue, TokenField
from verl.workers.config.explore import parts_of
from verl.workers.rollout.prompt_task import PromptSettings
from verl.workers.rollout.trajectory_tree import TrajectoryTree


def tree_of(config: DictConfig) -> str | None:
    """The policy that grows the run's trees; None: independent responses, or upstream's agent loops."""
    return parts_of(config.actor_rollout_ref.rollout).tree


class Component:
    """Does nothing; a component overrides what it needs.

    Hooks that get the trainer may read its config, `global_steps` and `total_training_steps`, and use its workers.

    A component is a class with the decorator `register_component` (verl.utils.parts). A run has it where `wanted` says
    so, whatever else the run is made of: HAPO's h goes with the tokens of any tree, LATR's scheduler with any loss.

    Attributes:
        computes: token fields that it makes of the old policy's entropies, where a part of the run needs them.
        state_file: its file in a checkpoint: JSON, or with tensors where the name ends in `.pt`.
    """

    computes: tuple[TokenField, ...] = ()
    state_file: str | None = None

    def __init__(self, config: DictConfig):
        self.config = config

    @classmethod
    def wanted(cls, config: DictConfig) -> bool:
        """Return whether a run with this config has the component: by default, if a part needs what it computes."""
        return not computed_fields(config).keys().isdisjoint(cls.computes)

    # ---- set-up ----

    def replay_buffer(self, trainer):
        """The replay buffer, in the place of upstream's; None: upstream's."""

    def choose_workers(self, worker_of_role: dict) -> None:
        """Change the remote classes of the workers, before they are made."""

    def train_dataloader(self, trainer):
        """The loader of training prompts, in the place of upstream's, which `trainer.train_dataloader` is; or None."""

    # ---- a step ----

    def step_settings(self, trainer) -> PromptSettings:
        """Return what the rollouts of all prompts of this step must know."""
        return PromptSettings()

    def prompt_settings(self, problems: Sequence[str]) -> Sequence[PromptSettings] | None:
        """Return what the rollout of each prompt must know; None for nothing.

        Args:
            problems: a name for each prompt's problem, the same in every step.
        """

    def on_drop(self, rows: BatchRows) -> None:
        """Look at the rows of groups that are replaced by others and will not be trained on."""

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        """Return `computes` by their names, each (B, T), from the old policy's entropies (B, T) in nats and the mask of
        the tokens that count."""
        return {}

    def context_values(self) -> dict[ContextValue, Any]:
        """Return what an advantage estimator needs beside token fields."""
        return {}

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        """Look at the batch, which has advantages by now, and at the step's metrics; credit's fields can be read."""

    def about_tree(self, tree: TrajectoryTree, rows: BatchRows, group: Group) -> None:
        """Add numbers to the `info` of a tree's segments, for the viewer; credit's fields can be read."""

    def around_update(self, trainer, metrics: dict) -> AbstractContextManager:
        """The actor is updated within it."""
        return nullcontext()

    # ---- checkpoint ----

    def state_dict(self) -> dict | None:
        """What it must know to go on; None: nothing to keep."""

    def load_state_dict(self, state: dict) -> None:
        """What `state_dict` gave; raises ValueError where the run's config does not fit to it."""


def components_of(config: DictConfig) -> list[Component]:
    """Return the components that a run with this config has, in the order of their names."""
    return [component(config) for component in parts("component").values() if component.wanted(config)]
