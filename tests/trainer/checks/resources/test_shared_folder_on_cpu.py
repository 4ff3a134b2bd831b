"""The check that all workers see the run's folder; a worker in another folder stands for another host's disk."""

import os

import pytest

from tests.forked import ray_of_forks
from verl.trainer.checks.resources.shared_folder import check_shared_folder
from verl.utils.fault_reports import RunError

pytestmark = pytest.mark.slow


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
