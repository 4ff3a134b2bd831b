"""Lets a resumed SFT train the epoch that follows a checkpoint at an epoch's end.

verl 0.9.1 restores the data loader's state there, which has no batch left: the loop over the next epoch is empty, and
the run ends an epoch early with exit code 0 (https://github.com/verl-project/verl/issues/7401). This can go when
upstream begins the next epoch.
"""

import functools
from types import ModuleType


def begin_epochs_after_checkpoints(checkpoint_handler: ModuleType) -> None:
    """Leave the data loader at the beginning of an epoch where a checkpoint is of an epoch's end."""
    handler = checkpoint_handler.CheckpointHandler
    load = handler._load_dataloader_state

    @functools.wraps(load)
    def load_within_epoch(self, checkpoint_path: str) -> None:
        step = checkpoint_handler.extract_step(checkpoint_path)
        if step is None or step % len(self.train_dataloader):
            load(self, checkpoint_path)

    handler._load_dataloader_state = load_within_epoch
