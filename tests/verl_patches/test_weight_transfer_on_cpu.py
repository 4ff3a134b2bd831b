"""Weights on their way by upstream's sender and receiver: two runs on a machine, and engines that fail or hang."""

import os
import subprocess

import pytest

from tests.forked import as_in_a_run
from tests.fresh import output_of

pytestmark = pytest.mark.slow


ENDS = {
    "works": "no error",
    "raises": "RuntimeError: the engine did not take the new weights: ValueError: lm_head was skipped",
    "hangs": "TimeoutError: the engine gave no answer to weights for 6 s",
    "returns early": "RuntimeError: the engine stopped taking weights before it had all of them",
}
PROGRAM = """
import asyncio, os, sys, time
import ray, torch
from omegaconf import OmegaConf
from verl_patches import weight_transfer
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

@ray.remote(num_cpus=0)
class Server:
    def __init__(self, behavior, replica):
        self.behavior, self.replica = behavior, replica
        import verl.workers.rollout.vllm_rollout.bucketed_weight_transfer

        os.environ["RAY_RAYLET_PID"] = "71"  # which the adapter's process has, too, as it would in a run

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver

        if self.behavior == "returns early":
            return
        job = ray.get_runtime_context().get_job_id()
        address = f"ipc:///tmp/rl-colocate-zmq-{job}-replica-{self.replica}-rank-0.sock"
        receiver = BucketedWeightReceiver(zmq_handle=address, device=torch.device("cpu"), use_shm=True)
        receiver.receive_weights(self.load)

    def load(self, weights, is_last):
        if self.behavior == "raises":
            raise ValueError("lm_head was skipped")
        if self.behavior == "hangs":
            time.sleep(600)
        print("LOADED", *(f"{name}={tensor.sum().item():g}" for name, tensor in weights), flush=True)

    def clear_kv_cache(self):
        pass

ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=10**8)
os.environ |= {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "RAY_RAYLET_PID": "71"}
one = dict.fromkeys(("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"), 1)
engine = {"_target_": "verl.workers.config.CheckpointEngineConfig", "update_weights_bucket_megabytes": 1}
bucket = {"checkpoint_engine": engine}
config = {"_target_": "verl.workers.config.RolloutConfig", "name": "vllm", "layered_summon": False, **one, **bucket}
servers = [Server.options(name=f"vllm_server_{i}_0").remote(behavior, i) for i, behavior in enumerate(sys.argv[1:])]
ray.get([server.clear_kv_cache.remote() for server in servers])  # they have made their imports
for replica, behavior in enumerate(sys.argv[1:]):
    weight_transfer.ANSWER_SECONDS = 6 if behavior == "hangs" else 60
    adapter = ServerAdapter(OmegaConf.create(config), None, None, replica_rank=replica)
    weights = ((f"weight{i}", torch.full((200_000,), i + 1.0)) for i in range(2))  # one in a bucket
    started, end = time.monotonic(), "no error"
    try:
        asyncio.run(adapter.update_weights(weights))
    except Exception as error:
        end = f"{type(error).__name__}: {error}"
    print(f"END {behavior}|{end}|{time.monotonic() - started}", flush=True)
time.sleep(1)  # for the actors' output
"""


@pytest.fixture(scope="module")
def output() -> str:
    return output_of(["python", "-c", PROGRAM, *ENDS], as_in_a_run(os.environ), timeout=300)


def test_weights_arrive(output):
    assert "LOADED weight0=200000" in output and "LOADED weight1=400000" in output


@pytest.mark.parametrize("behavior", ENDS)
def test_the_wait_for_the_engine_ends_with_the_cause(output, behavior):
    (line,) = [line for line in output.splitlines() if line.startswith(f"END {behavior}|")]
    _, end, seconds = line.split("|")
    assert end.startswith(ENDS[behavior]) and float(seconds) < 20


# the first worker of each run, and its server: four forks, which differ in the variable that their raylet sets
TWO_RUNS = """
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
    done = subprocess.run(["python", "-c", TWO_RUNS], **run)
    received = sorted(line for line in done.stdout.splitlines() if line.startswith("RECEIVED"))
    assert received == ["RECEIVED 11 11.0 11.0 11.0 11.0", "RECEIVED 22 22.0 22.0 22.0 22.0"], done.stderr[-2000:]
