"""Upstream's count of the cluster's GPUs, and runs that do without it."""

import os
import subprocess

import pytest
from verl.single_controller.ray import base

from tests.fresh import python_for
from verl_patches.missing_gpus import leave_missing_gpus_to_the_watch


def test_pools_are_created_without_the_count(monkeypatch):
    manager = base.ResourcePoolManager
    monkeypatch.setattr(manager, "_check_resource_available", manager._check_resource_available)  # put back afterwards
    leave_missing_gpus_to_the_watch(base)
    pools = manager({"global_pool": [8] * 4}, {})
    pools.create_resource_pool()  # no Ray is running: upstream's count would fail
    assert pools.get_n_gpus() == 32


@pytest.mark.slow
@pytest.mark.parametrize("setting, owner", [("1", "leave_missing_gpus_to_the_watch"), ("0", "ResourcePoolManager")])
def test_only_runs_that_are_watched_leave_out_the_count(setting, owner):
    program = "from verl.single_controller.ray import base; print(base.ResourcePoolManager._check_resource_available)"
    environment = {**os.environ, "VERL_WAIT_FOR_NODES": setting}
    ended = subprocess.run(python_for(program), env=environment, capture_output=True, text=True)
    assert f"<function {owner}." in ended.stdout, ended.stderr
