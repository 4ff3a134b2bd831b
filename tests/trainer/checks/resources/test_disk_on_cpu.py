"""The checkpoints to come must fit on the disk, and the weights on their way to vLLM into shared memory."""

import math
import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM

from tests.configs import composed
from tests.forked import ray_of_forks
from tests.tables import table
from tests.trainer.checks.model.models import TINY, decoder, model
from verl.trainer.checks.resources.disk import BUCKET, check_disk, check_shared_folder, check_shared_memory, disk_plan
from verl.utils.fault_reports import RunError


@pytest.fixture
def config(tmp_path):
    config = composed("grpo_trainer", f"trainer.default_local_dir={tmp_path}/run/new")
    OmegaConf.set_struct(config, False)
    model("Qwen2.5-7B").save_pretrained(tmp_path / "model")
    config.actor_rollout_ref.model.path = str(tmp_path / "model")
    saving = {"save_freq": 50, "total_training_steps": 200, "max_actor_ckpt_to_keep": 2}
    return OmegaConf.merge(config, {"trainer": saving})


def test_a_checkpoint_has_the_weights_and_adams_two_states(config):
    size, number, free = disk_plan(config)
    assert size == pytest.approx(7.62e9 * (4 + 4 + 4), rel=0.01) and number == 2 and free > 0
    config.actor_rollout_ref.model.lora_rank = 8
    size, _, _ = disk_plan(config)
    assert 7.62e9 * 4 < size < 7.62e9 * 4 * 1.1


@pytest.mark.parametrize(("changes", "number"), table(__file__, "checkpoints to come"))
def test_the_number_of_checkpoints_to_come(config, changes, number):
    assert disk_plan(OmegaConf.merge(config, {"trainer": changes}))[1] == number


def test_a_folder_into_which_nothing_can_be_written_is_named(config):
    config.trainer.validation_data_dir = f"{config.actor_rollout_ref.model.path}/config.json/validation"
    with pytest.raises(ValueError, match="trainer.validation_data_dir=.*: nothing can be written into .*config.json"):
        check_disk(config)


def test_a_disk_without_room_is_refused(config, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=200e9))
    check_disk(config)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=180e9))
    with pytest.raises(ValueError, match=r"180.0 GB are free there, and the run will write 2 checkpoint.* of 91.4 GB"):
        check_disk(config)
    config.trainer.save_freq = -1
    check_disk(config)


@pytest.mark.parametrize("tied", [True, False])
def test_shared_memory_must_hold_the_weights_that_the_trainer_sends(tmp_path, monkeypatch, tied):
    """The trainer sends the model's state, in which a tied head is a tensor of its own."""
    hf_config = decoder(*TINY, tied)
    hf_config.save_pretrained(tmp_path)
    state = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).state_dict()
    megabytes = sum(tensor.nbytes for tensor in state.values()) / 2**20
    config = composed("grpo_trainer", "hardware=cpu", f"actor_rollout_ref.model.path={tmp_path}")
    config.trainer.n_gpus_per_node = 20
    for bucket, needed in ((2048, 20 * megabytes), (0.5, 10)):
        OmegaConf.update(config, BUCKET, bucket)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=needed + 1: SimpleNamespace(free=free * 2**20))
        check_shared_memory(config, str(tmp_path))
        monkeypatch.setattr(shutil, "disk_usage", lambda _, free=needed - 1: SimpleNamespace(free=free * 2**20))
        with pytest.raises(ValueError, match=f"MB free, and the weights .* need {math.ceil(needed)} MB there"):
            check_shared_memory(config, str(tmp_path))


def test_shared_memory_must_hold_nccls_on_several_gpus(tmp_path, monkeypatch):
    config = composed("grpo_trainer", "hardware=gpu", "trainer.n_gpus_per_node=8")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**26))  # Docker's default
    with pytest.raises(ValueError, match=r"has 64 MB free, and 8 GPUs \(NCCL\) need 512 MB there: .* --shm-size=1g"):
        check_shared_memory(config, str(tmp_path))
    config.trainer.n_gpus_per_node = 1
    check_shared_memory(config, str(tmp_path))


@pytest.mark.slow
def test_a_worker_that_does_not_see_the_folder_is_named(tmp_path, monkeypatch):
    """The folder's path is relative, so that it names two folders for two workers."""
    import ray

    class Worker:
        def __init__(self, place: str):
            os.makedirs(place, exist_ok=True)
            os.chdir(place)

    (tmp_path / "shared").mkdir()
    monkeypatch.chdir(tmp_path / "shared")
    with ray_of_forks(num_cpus=1, object_store_memory=10**8):
        worker = ray.remote(num_cpus=0)(Worker)
        sharing = [worker.remote(str(tmp_path / "shared")) for _ in range(2)]
        check_shared_folder(sharing, "run")
        assert list((tmp_path / "shared/run").iterdir()) == []
        with pytest.raises(
            RunError, match=r"trainer.default_local_dir=run is not shared: workers on [\d.]+ do not see"
        ):
            check_shared_folder([*sharing, worker.remote(str(tmp_path / "other"))], "run", seconds=1)
    assert list((tmp_path / "shared/run").iterdir()) == []
