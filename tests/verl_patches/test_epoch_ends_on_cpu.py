"""A resumed SFT and the data that are left, by upstream's checkpoint handler and a real data loader."""

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.checkpoint.checkpoint_handler import CheckpointHandler, OrchestrationMode

STEPS_PER_EPOCH = 4


def handler_of(loader: StatefulDataLoader) -> CheckpointHandler:
    return CheckpointHandler(None, loader, default_local_dir=None, mode=OrchestrationMode.RAY)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step, left", [(2, [2, 3]), (4, [0, 1, 2, 3]), (7, [3]), (8, [0, 1, 2, 3])])
def test_batches_after_a_checkpoint(tmp_path, step, left, workers):
    loader = StatefulDataLoader(range(STEPS_PER_EPOCH), batch_size=1, num_workers=workers)
    trained = 0
    while trained < step:
        for _ in loader:
            trained += 1
            if trained == step:  # in the loop, where upstream saves
                folder = tmp_path / f"global_step_{step}"
                folder.mkdir()
                torch.save(loader.state_dict(), folder / "data_0.pt")
                break
    resumed = StatefulDataLoader(range(STEPS_PER_EPOCH), batch_size=1, num_workers=workers)
    handler_of(resumed)._load_dataloader_state(str(folder))
    assert [int(batch) for batch in resumed] == left
    assert [int(batch) for batch in resumed] == [0, 1, 2, 3], "the epoch after it is whole"
