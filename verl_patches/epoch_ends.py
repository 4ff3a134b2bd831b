"""Lets an SFT run that resumes from a checkpoint at an epoch's end train the next epoch.

verl 0.9.1 restores the data loader's state, which has no batch left then: the loop over the next epoch is empty, and
the run ends an epoch early with exit code 0 (https://github.com/verl-project/verl/issues/7401). This can go when
upstream begins the next epoch.
"""

import functools
from types import ModuleType


def begin_epochs_after_checkpoints(checkpoint_handler: ModuleType) -> None:
    """Do not restore the data loader's state from a checkpoint at an epoch's end, so that the next epoch begins."""
    handler = checkpoint_handler.CheckpointHandler
    load = handler._load_dataloader_state

    @functools.wraps(load)
    def load_within_epoch(self, checkpoint_path: str) -> None:
        step = checkpoint_handler.extract_step(checkpoint_path)
        if step is None or step % len(self.train_dataloader):
            load(self, checkpoint_path)

    handler._load_dataloader_state = load_within_epoch
