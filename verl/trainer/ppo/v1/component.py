"""What a method does in a training step beside upstream's: a component, which the trainer calls at fixed places."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from omegaconf import DictConfig
from tensordict import TensorDict

from verl.trainer.ppo.v1.batch_rows import BatchRows, Group
from verl.utils.token_fields import ContextValue
from verl.workers.config.explore import parts_of
from verl.workers.rollout.trajectory_tree import TrajectoryTree


def tree_of(config: DictConfig) -> str | None:
    """The policy that grows the run's trees; None: independent responses, or upstream's agent loops."""
    return parts_of(config.actor_rollout_ref.rollout).tree


class Component:
    """Does nothing; a component overrides what it needs.

    Hooks that get the trainer may read its config, `global_steps` and `total_training_steps`, and use its workers.

    Attributes:
        fields: names of the token fields that it makes for the loss.
        entropy_for: the mechanism, in a user's words, that needs the old policy's entropies; None: nothing does.
        state_file: its file in a checkpoint: JSON, or with tensors where the name ends in `.pt`.
    """

    fields: tuple[str, ...] = ()
    entropy_for: str | None = None
    state_file: str | None = None

    def __init__(self, config: DictConfig):
        self.config = config

    @staticmethod
    def wanted(config: DictConfig) -> bool:
        """Whether a run with this config has the component."""
        raise NotImplementedError

    # ---- set-up ----

    def replay_buffer(self, trainer):
        """The replay buffer, in the place of upstream's; None: upstream's."""

    def choose_workers(self, worker_of_role: dict) -> None:
        """Change the remote classes of the workers, before they are made."""

    def train_dataloader(self, trainer):
        """The loader of training prompts, in the place of upstream's, which `trainer.train_dataloader` is; or None."""

    # ---- a step ----

    def before_rollout(self, batch: TensorDict, trainer) -> None:
        """Attach to the prompts what their rollouts must know."""

    def on_drop(self, rows: BatchRows) -> None:
        """Look at the rows of groups that are replaced by others and will not be trained on."""

    def token_fields(self, entropy: torch.Tensor, mask: torch.Tensor, metrics: dict) -> dict[str, torch.Tensor]:
        """`fields`, each (B, T), from the old policy's entropies (B, T) in nats and the tokens that count."""
        return {}

    def given(self) -> dict[ContextValue, Any]:
        """What an advantage estimator needs beside the rollout's token fields."""
        return {}

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        """Look at the batch, which has advantages by now, and at the step's metrics; credit's fields are given."""

    def about_tree(self, tree: TrajectoryTree, rows: BatchRows, group: Group) -> None:
        """Add what is known by now of a tree's segments to their `info`, for the viewer; credit's fields are given."""

    def around_update(self, trainer, metrics: dict) -> AbstractContextManager:
        """The actor is updated within it."""
        return nullcontext()

    # ---- checkpoint ----

    def state_dict(self) -> dict | None:
        """What it must know to go on; None: nothing to keep."""

    def load_state_dict(self, state: dict) -> None:
        """What `state_dict` gave; raises ValueError where the run's config does not fit to it."""
