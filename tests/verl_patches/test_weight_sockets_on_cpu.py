"""Two runs on one machine send weights at the same time, by upstream's sender and receiver."""

import os
import subprocess

import pytest

from tests.forked import as_in_a_run

pytestmark = pytest.mark.slow


# the first worker of each run, and its server: four forks, which differ in the variable that their raylet sets
PROGRAM = """
import asyncio, multiprocessing, os, torch
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver, BucketedWeightSender
HANDLE = "ipc:///tmp/rl-colocate-zmq-01000000-replica-test-rank-0.sock"

def send(raylet):
    os.environ["RAY_RAYLET_PID"] = str(raylet)
    weights = iter([("weight", torch.full((4,), float(raylet)))])
    asyncio.run(BucketedWeightSender(zmq_handle=HANDLE, bucket_size_mb=1, use_shm=True).async_send_weights(weights))

def receive(raylet):
    os.environ["RAY_RAYLET_PID"] = str(raylet)
    receiver = BucketedWeightReceiver(zmq_handle=HANDLE, device=torch.device("cpu"), use_shm=True)
    receiver.receive_weights(lambda weights, is_last: print("RECEIVED", raylet, *weights[0][1].tolist(), flush=True))

fork = multiprocessing.get_context("fork")
# both senders are there before any receiver: with one name for both, the second takes the first one's place
processes = [fork.Process(target=end, args=(raylet,), daemon=True) for end in (send, receive) for raylet in (11, 22)]
for process in processes:
    process.start()
    process.join(timeout=1)
for process in processes:
    process.join(timeout=10)
"""


def test_each_server_gets_its_own_runs_weights():
    run = {"env": as_in_a_run(os.environ), "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(["python", "-c", PROGRAM], **run)
    received = sorted(line for line in done.stdout.splitlines() if line.startswith("RECEIVED"))
    assert received == ["RECEIVED 11 11.0 11.0 11.0 11.0", "RECEIVED 22 22.0 22.0 22.0 22.0"], done.stderr[-2000:]
