"""Measures the host memory of a run's processes by their kind, and warns before Ray kills one of them.

The TaskRunner measures the processes on its own node. It counts memory that several processes share, such as imported
modules of forked processes, in equal parts (Linux's PSS), so that the kinds add up to the run's memory. Ray's memory
monitor (2.60) kills a process when the memory of the whole node or container, with all other programs in it, is in use
up to `RAY_memory_usage_threshold`.
"""

import os
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Mapping

import psutil
import ray
from ray._private.utils import get_system_memory, get_used_memory

METRIC = "perf/host_memory_gb/"
USED_SHARE = "perf/host_memory_used_share"
# The launcher's process id, which it passes on to the run's processes; all of them descend from it.
LAUNCHER = "VERL_LAUNCHER"
LOOK_SECONDS = 1.0
# To measure all processes takes about 0.2 s of a core.
MEASURE_SECONDS = 10.0
# Processes with less memory count with their resident set size, because the exact size takes 10 ms a process.
SMALL_BYTES = 64 * 2**20
# Ray's default for RAY_memory_usage_threshold, and the distance to it from which this module warns.
RAY_THRESHOLD, WARN_DISTANCE = 0.95, 0.05
# Patterns of the command lines of each kind; a process that fits none is of its parent's kind.
KINDS = {
    "trainer": r"ray::TaskRunner|main_ppo",
    "vllm": r"VLLM::|ray::(vLLM|TopLogprobs)\w*|ray::CheckpointEngineWorker",
    "workers": r"ray::\w*WorkerDict|ray::\w*TrainingWorker",
    "agent_loop": r"ray::\w*AgentLoopWorker",
    "reward": r"ray::Reward",
    "transfer_queue": r"ray::(SimpleStorageUnit|TransferQueue)",
    "ray": r"ray::|/ray/|gcs_server|raylet",
}
ADVICE = {
    "trainer": "data.train_batch_size or actor_rollout_ref.rollout.n",
    "vllm": "VLLM_CPU_KVCACHE_SPACE (on CPUs) or actor_rollout_ref.rollout.max_num_seqs",
    "workers": "actor_rollout_ref.actor.ppo_max_token_len_per_gpu, or keep parameters and optimizer on the GPUs "
    "(actor_rollout_ref.actor.fsdp_config.param_offload=false, optimizer_offload=false)",
    "agent_loop": "actor_rollout_ref.rollout.agent.num_workers, or serve a search index by scripts/search_server.py",
    "reward": "reward.num_workers",
    "transfer_queue": "data.train_batch_size or actor_rollout_ref.rollout.n",
    "ray": "ray_kwargs.ray_init.object_store_memory",
    "other": "the memory of this machine's other programs",
}


def kinds_of_processes(roots: Mapping[int, str]) -> dict[psutil.Process, str]:
    """Return the kind of all descendants of `roots`: process id -> kind, if the root's command line tells none."""
    children: dict[int, list[psutil.Process]] = defaultdict(list)
    by_id = {}
    for process in psutil.process_iter(["ppid", "cmdline", "memory_info"]):
        by_id[process.pid] = process
        children[process.info["ppid"]].append(process)
    kinds: dict[psutil.Process, str] = {}
    open_processes = [(by_id[pid], kind) for pid, kind in roots.items() if pid in by_id]
    while open_processes:
        process, parents_kind = open_processes.pop()
        if process not in kinds:
            kinds[process] = _kind(" ".join(process.info["cmdline"] or []), parents_kind)
            open_processes += [(child, kinds[process]) for child in children[process.pid]]
    return kinds


def _kind(command_line: str, parents_kind: str) -> str:
    if "fork_server" in command_line or "launch.py" in command_line:  # their arguments name the run's programs
        return "other"
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, command_line)), parents_kind)


def run_roots() -> dict[int, str]:
    """Return processes of which all of this run's processes on this node descend, with their kinds: the launcher if
    this process descends from it, else the actors of this job, as Ray's own processes in a cluster serve other jobs,
    too."""
    launcher = int(os.environ.get(LAUNCHER, 0))
    if launcher in (parent.pid for parent in psutil.Process().parents()):
        return {launcher: "other"}
    roots = {os.getpid(): "trainer"}
    if ray.is_initialized():
        job, node = (ray.get_runtime_context().get_job_id(), ray.get_runtime_context().get_node_id())
        actors = ray._private.state.actors(job_id=ray.JobID.from_hex(job), actor_state_name="ALIVE").values()
        roots |= {actor["Pid"]: "other" for actor in actors if actor["Address"]["NodeID"] == node}
    return roots


def measure(kinds: Mapping[psutil.Process, str]) -> dict[str, float]:
    """Return the memory of each kind in GB (10^9 bytes); processes that have just ended are left out."""
    sizes: dict[str, float] = defaultdict(float)
    for process, kind in kinds.items():
        info = process.info["memory_info"]
        size = info.rss if info else 0
        if size > SMALL_BYTES:
            try:
                size = process.memory_full_info().pss
            except psutil.Error:
                continue
        sizes[kind] += size / 1e9
    return dict(sizes)


class HostMemoryWatch:
    """The TaskRunner's thread that keeps the peaks of the memory by kind and of the node's share in use, until `ended`
    is set."""

    def __init__(self, threshold: float | None = None):
        self.threshold = threshold or float(os.environ.get("RAY_memory_usage_threshold", RAY_THRESHOLD))
        self.peaks: dict[str, float] = {}
        self.used_share = 0.0
        self.warned = False
        self.ended = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self.run, name="HostMemoryWatch", daemon=True).start()

    def run(self) -> None:
        looks = 0
        while not self.ended.wait(LOOK_SECONDS):
            self.look()
            if looks % (MEASURE_SECONDS // LOOK_SECONDS) == 0:
                self.measure()
            looks += 1

    def look(self) -> None:
        """Read the node's memory in use, and warn once if it is near Ray's limit."""
        total = get_system_memory()
        share = get_used_memory() / total
        self.used_share = max(self.used_share, share)
        if share > self.threshold - WARN_DISTANCE and not self.warned:
            self.warned = True
            sizes = self.measure()
            kinds = sorted(sizes, key=lambda kind: -sizes[kind])
            shown = ", ".join(f"{kind} {sizes[kind]:.1f}" for kind in kinds)
            print(
                f"warning: {share:.0%} of the {total / 1e9:.1f} GB of memory of this node ({os.uname().nodename}) are "
                f"in use, and Ray kills processes of the run at {self.threshold:.0%} (RAY_memory_usage_threshold). GB "
                f"by kind of process: {shown}. Lower {ADVICE[kinds[0] if kinds else 'other']}",
                file=sys.stderr,
                flush=True,
            )

    def measure(self) -> dict[str, float]:
        """Return the memory of each kind in GB, and keep the peaks."""
        sizes = measure(kinds_of_processes(run_roots()))
        self.peaks = {kind: max(sizes.get(kind, 0.0), self.peaks.get(kind, 0.0)) for kind in {*sizes, *self.peaks}}
        return sizes

    def metrics(self) -> dict[str, float]:
        """Return the peaks since the run's start as metrics of a step."""
        return {f"{METRIC}{kind}": peak for kind, peak in self.peaks.items()} | {USED_SHARE: self.used_share}
