"""SystemExit and KeyboardInterrupt in workers and in TransferQueue's threads, with the real actors."""

import asyncio
import inspect

import pytest
import ray
import torch
import transfer_queue as tq
import transfer_queue.controller
import transfer_queue.storage.simple_storage
from tensordict import TensorDict
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from tests.forked import ray_of_forks
from verl.utils.fault_reports import reported_faults
from verl_patches import named_exits


def test_all_methods_that_the_trainer_calls_report_exits():
    for worker in (TrainingWorker, ActorRolloutRefWorker):
        methods = {name: method for name, method in vars(worker).items() if hasattr(method, MAGIC_ATTR)}
        assert "save_checkpoint" in methods
        assert all(method.__code__.co_filename.endswith("named_exits.py") for method in methods.values()), methods


@pytest.mark.parametrize("error", [SystemExit(0), KeyboardInterrupt()], ids=repr)
def test_a_workers_exit_is_reported_with_its_name(monkeypatch, error):
    def save():
        raise error

    reports = []
    monkeypatch.setattr(named_exits, "report_fault", reports.append)
    with pytest.raises(type(error)):
        named_exits.reporting(save, "Worker.save")()
    assert len(reports) == 1 and reports[0].startswith("Worker.save (process ") and repr(error) in reports[0]
    with pytest.raises(ZeroDivisionError):
        named_exits.reporting(lambda: 1 / 0, "Worker.save")()
    assert len(reports) == 1

    async def update():
        raise error

    update = named_exits.reporting(update, "Worker.update")
    assert inspect.iscoroutinefunction(update)  # upstream asks
    with pytest.raises(type(error)):
        update().send(None)
    assert len(reports) == 2 and reports[1].startswith("Worker.update (process ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "error"), [("_handle_request", asyncio.CancelledError()), ("_handle_put", SystemExit(0))]
)
def test_the_end_of_a_thread_of_the_queue_is_reported(place, error):
    """The real actors; a request that raises this ends their thread, and nobody would answer any more."""
    module = transfer_queue.controller if place == "_handle_request" else transfer_queue.storage.simple_storage
    name = "TransferQueueController" if place == "_handle_request" else "SimpleStorageUnit"

    with ray_of_forks(num_cpus=4, object_store_memory=10**8):
        owner = vars(module)[name].__ray_metadata__.modified_class

        def fail(self, *args, **kwargs):
            raise error

        before = getattr(owner, place)
        setattr(owner, place, fail)
        try:
            tq.init()

            @ray.remote(num_cpus=0)
            def put():
                tq.init()
                tq.kv_batch_put(keys=["a"], fields=TensorDict({"x": torch.zeros(1, 2)}, batch_size=1), partition_id="t")

            call = put.remote()
            ray.wait([call], timeout=10)
            faults = reported_faults()
        finally:
            setattr(owner, place, before)
            tq.close()
    assert len(faults) >= 1 and faults[0].startswith(f"{name}._")
    assert f"raised {error!r}" in faults[0]
