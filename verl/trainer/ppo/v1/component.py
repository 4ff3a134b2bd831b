"""Components: the additions of methods to upstream's training step, which the trainer calls at fixed places."""

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
    """Return the name of the policy that grows the run's trees; None for independent responses or agent loops."""
    return parts_of(config.actor_rollout_ref.rollout).tree


class Component:
    """A component without effect, whose subclasses, with the decorator `register_component`, override the hooks that
    they need. Hooks that get the trainer may read its config, `global_steps` and `total_training_steps`, and use its
    workers.

    `computes` are token fields that it computes from the old policy's entropies, if a part of the run needs them;
    `state_file` is its file in a checkpoint: torch's format if it ends in `.pt`, otherwise JSON.
    """

    computes: tuple[TokenField, ...] = ()
    state_file: str | None = None

    def __init__(self, config: DictConfig):
        self.config = config

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        """Return whether a run with this config has the component: by default, if a part needs what it computes."""
        return not computed_fields(config).keys().isdisjoint(cls.computes)

    @classmethod
    def check(cls, config: DictConfig) -> None:
        """Check the settled config of a run that has the component; raise a ValueError that names a wrong key."""

    # ---- set-up ----

    def choose_workers(self, worker_of_role: dict) -> None:
        """Change the remote classes of the workers before the workers are created."""

    def train_dataloader(self, trainer):
        """Return the loader of prompts that replaces upstream's `trainer.train_dataloader`; None to keep upstream's."""

    # ---- a step ----

    def step_settings(self, trainer) -> PromptSettings:
        """Return the settings for the rollouts of all prompts of this step."""
        return PromptSettings()

    def prompt_settings(self, problems: Sequence[str]) -> Sequence[PromptSettings] | None:
        """Return the settings for the rollout of each prompt, from the names of their problems, which are the same in
        every step; None for no settings."""

    def on_drop(self, rows: BatchRows) -> None:
        """Read the rows of groups that will be replaced by others and not be trained on."""

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        """Return by name the token fields (B, T) that `computes` lists, from the old policy's entropies in nats and the
        mask of the tokens that count; `metrics` of the step may be added."""
        return {}

    def context_values(self) -> dict[ContextValue, Any]:
        """Return the values, other than token fields, that an advantage estimator needs."""
        return {}

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        """Read the batch, which now has advantages, and change the step's metrics; credit's fields can be read."""

    def annotate(self, tree: TrajectoryTree, rows: BatchRows, group: Group) -> None:
        """Add numbers to the `info` of a tree's segments, for the viewer; credit's fields can be read."""

    def around_update(self, trainer, metrics: dict) -> AbstractContextManager:
        """Return a context manager within which the actor is updated."""
        return nullcontext()

    # ---- checkpoint ----

    def state_dict(self) -> dict | None:
        """Return the state that a resumed run needs; None if there is nothing to keep."""

    def load_state_dict(self, state: dict) -> None:
        """Restore a state that `state_dict` returned; raise ValueError if the run's config does not fit it."""

    def on_resume(self, trainer) -> None:
        """Called after `load_state_dict`."""


def components_of(config: DictConfig) -> list[Component]:
    """Return the components of a run with this config, sorted by name."""
    return [component(config) for component in parts("component").values() if component.is_needed(config)]
