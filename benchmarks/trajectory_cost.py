"""Measures CPU time per trajectory of a rollout without the engine: upstream's path, and ours with each tree.

    VERL_PLATFORM=cpu python -m benchmarks.trajectory_cost [--prompts 16] [--n 8] [--tokens 24] [--launches 1]

The rollout's part of the stack is real: Ray, TransferQueue, the load balancer, agent-loop and reward-loop workers. The
rollout server is an actor that answers at once with random tokens. A run submits prompts as upstream's trainer does,
waits for them in upstream's replay buffer, reads the columns that a step reads, and clears them. Each side has an
agent-loop worker of its own, and the sides take turns. CPU time is user and system time of all processes, from /proc,
minus the time that the idle processes use in an equally long period; the server's time is listed separately.

`--launches` is the number of whole runs of GRPO on Countdown by upstream's manager and by ours, in turns. Their CPU
time is measured by process between the second step and the last but one. Writes benchmarks/results/trajectory_cost.md.
"""

import os
import random
import subprocess
import tempfile
import time
import uuid
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import ray
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import verl.trainer
from benchmarks.report import in_turns, parser_of, table_lines, with_range, write_report
from recipe.common.problem_files import rl_row
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.utils.parts import load_choices
from verl.workers.rollout.engines.request_batching import ExchangeServer

ROOT = Path(__file__).resolve().parents[1]
UPSTREAM = "upstream"
SMALL = {
    "arpo": {"initial_rollouts": 4, "entropy_tokens": 4, "max_turn_tokens": 8, "turn_delimiter": "1"},
    "eptree": {"custom": {"eptree": {"M": 2, "N": 3, "L": 1, "T": 1}}},
    "tree_grpo": {"custom": {"tree_grpo": {"M": 2, "N": 3, "L": 1, "step_delimiter": "1"}}},
    "latr": {"kt": {"chunk_size": 4, "prob_filter_abs_thres": 0.1, "prob_filter_rel_thres": 0.4}},
}
TREES = ("plain", "latr", "arpo", "hato", "over_generation", "eptree", "tree_grpo")
# beginning of a process's name -> column of the table that counts its seconds
COLUMNS = {
    "ray::GroupAgentLoopWorker": "agent loop",
    "ray::AgentLoopWorker": "agent loop",
    "ray::RewardLoopWorker": "reward loop",
    "ray::TransferQueueController": "controller",
    "ray::SimpleStorageUnit": "storage",
    "ray::GlobalRequestLoadBalancer": "balancer",
    "ray::StubServer": "server",
    "VLLM::EngineCore": "engine core",
    "ray::WorkerDict": "trainer's worker",
    "ray::vLLMHttpServer": "server",
    "ray::TopLogprobsServer": "server",
    "ray::TaskRunner": "driver",
}
PARTS = ["driver", "agent loop", "reward loop", "controller", "storage", "balancer", "Ray"]
VARIABLES = {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
VARIABLES |= {"TQ_NUM_THREADS": "1", "TRANSFER_QUEUE_ENABLE": "1"}
# Numbers for the estimate on paper: nodes, trajectories of a step, and processes of each kind in a run on GPUs.
NODES, STEP = 8, 8192
PROCESSES = {"driver": 1, "controller": 1, "balancer": 1, "storage": 8}
PROCESSES |= {"agent loop": 8 * NODES, "reward loop": 8 * NODES}
READ = ["responses", "response_mask", "rm_scores", "rollout_log_probs", "uid", "extra_fields"]
# overrides for a whole run with upstream's manager and servers
UPSTREAMS_WAY = (
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class=null",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_SHARED_CALLS='0'",
)


def answer(prompt_ids: list[int], params: dict, vocabulary: int, stop_token_ids: list[int]):
    """Return verl's TokenOutput with `params["max_tokens"]` random tokens, none of which is a stop token."""
    from verl.workers.rollout.replica import TokenOutput

    draw = random.Random(f"{params.get('seed')} {len(prompt_ids)} {prompt_ids[-1]}" if "seed" in params else None)
    n = params.get("max_tokens", 12)
    tokens = draw.choices([token for token in range(vocabulary) if token not in stop_token_ids], k=n)
    fields: dict = {"global_steps": 1}
    if n_top_logprobs := params.get("n_top_logprobs"):
        others = range(n_top_logprobs - 1)
        fields["top_logprobs"] = [
            [(token, -0.7), *(((token + 1 + i) % vocabulary, -0.8 - i) for i in others)] for token in tokens
        ]
    if params.get("n_entropy"):
        fields["entropies"] = [draw.random() for _ in tokens]
    return TokenOutput(
        token_ids=tokens,
        log_probs=[-0.7] * n if params.get("logprobs") else None,
        stop_reason="completed",
        extra_fields=fields,
    )


@ray.remote
class StubServer(ExchangeServer):
    """A stand-in for upstream's rollout server and for `TopLogprobsServer`, without an engine."""

    def __init__(self, vocabulary: int, stop_token_ids: list[int], response_length: int):
        self.vocabulary, self.stop_token_ids, self.response_length = vocabulary, stop_token_ids, response_length
        self.requests = 0

    async def generate(self, prompt_ids, sampling_params, request_id, **_):
        """Return random tokens at once."""
        self.requests += 1
        sampling_params.setdefault("max_tokens", self.response_length)
        return answer(prompt_ids, sampling_params, self.vocabulary, self.stop_token_ids)

    async def count(self) -> int:
        """Return the number of requests so far."""
        return self.requests


def config_of(tree: str, folder: Path, args) -> DictConfig:
    """Return a run's config with this tree, or without a tree for `upstream`."""
    search = f"hydra.searchpath=[file://{Path(verl.trainer.__path__[0]) / 'config'}]"
    chosen = ["tree=plain", "actor_rollout_ref.rollout.tree=null"] if tree == UPSTREAM else [f"tree={tree}"]
    load_choices()
    with initialize_config_dir(str(ROOT / "recipe/common/config"), version_base=None):
        config = compose("explore", [search, "hardware=cpu", "trainer.experiment_name=trajectory_cost", *chosen])
    OmegaConf.set_struct(config, False)
    rollout = {"n": args.n, "prompt_length": 32, "response_length": args.tokens, "val_kwargs": {"n": args.n}}
    config.actor_rollout_ref.rollout.merge_with(rollout | SMALL.get(tree, {}))
    config.actor_rollout_ref.model.path = str(folder)
    if tree == "hato":
        config.hato.tree.update({"max_step_tokens": max(2, args.tokens // 3), "max_depth": 4})
    config.transfer_queue.enable = True
    OmegaConf.resolve(config)
    return config


def seconds_by_column(driver: psutil.Process) -> pd.Series:
    """Return the CPU seconds that a process and its descendants have used so far, by table column (COLUMNS)."""
    seconds = dict.fromkeys([*PARTS, *COLUMNS.values()], 0.0)
    for process in (driver, *driver.children(recursive=True)):
        try:
            name, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        column = next((column for prefix, column in COLUMNS.items() if name.startswith(prefix)), "Ray")
        seconds["driver" if process == driver else column] += times.user + times.system
    return pd.Series(seconds)


class Stack:
    """A local Ray with all that the sides share, and an agent-loop manager for each side."""

    def __init__(self, sides: list[str], folder: Path, args):
        import transfer_queue as tq
        from transformers import AutoTokenizer
        from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer
        from verl.workers.rollout.llm_server import LLMServerClient
        from verl.workers.rollout.router import get_router_handle

        from verl.experimental.reward_loop import RewardLoopManager
        from verl.trainer.ppo.v1 import AgentLoopManagerTQ
        from verl.workers.rollout.group_rollout import GroupAgentLoopManager

        write_tiny_model(folder, TinyModelConfig(seed=1))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.args, self.tq = args, tq
        ray.init(
            address="local",
            num_cpus=24,
            include_dashboard=False,
            object_store_memory=2**28,
            logging_level="ERROR",
            log_to_driver=False,
            runtime_env={"env_vars": VARIABLES},
        )
        configs = {side: config_of(side, folder, args) for side in sides}
        first = next(iter(configs.values()))
        tq.init(first.transfer_queue)
        self.server = StubServer.remote(len(tokenizer), [tokenizer.eos_token_id], args.tokens)
        balancer = get_router_handle(servers={"stub": self.server})
        self.rewards = RewardLoopManager(first)
        self.managers = {}
        for side, config in configs.items():
            manager = AgentLoopManagerTQ if side == UPSTREAM else GroupAgentLoopManager
            self.managers[side] = manager.create(
                config=config,
                llm_client=LLMServerClient(config, balancer),
                teacher_client=None,
                reward_loop_worker_handles=self.rewards.reward_loop_worker_handles,
            )
        sampler = first.trainer.v1.sampler
        self.buffer = ReplayBuffer("sync", {}, sampler.max_off_policy_threshold, sampler.max_off_policy_strategy, {})

    def run(self, side: str, run: int) -> pd.Series:
        """Return by table column the CPU milliseconds per trajectory, and as `requests` the requests per trajectory."""
        driver = psutil.Process()
        time.sleep(0.5)
        idle = seconds_by_column(driver)
        time.sleep(1)
        requests, before, started = ray.get(self.server.count.remote()), seconds_by_column(driver), time.perf_counter()
        rows = self.step(side, run)
        wall, after = time.perf_counter() - started, seconds_by_column(driver)
        used = 1000 * (after - before - wall * (before - idle))
        used["requests"] = ray.get(self.server.count.remote()) - requests
        return used / rows

    def step(self, side: str, run: int) -> int:
        """Submit a batch, wait for its rows, read and clear them, as a trainer does; return the number of rows."""
        batch = self.batch(run)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": run + 1} for _ in range(len(batch))]
        self.tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)
        self.managers[side].generate_sequences(batch)
        rows, _ = self.buffer.sample(global_steps=run + 1, partition_id="train", batch_size=self.args.prompts)
        data = self.tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=READ)
        self.tq.kv_clear(keys=rows.keys, partition_id="train")
        if not 0 < len(data["uid"]) <= self.args.prompts * self.args.n:
            raise RuntimeError(f"{side}: {len(data['uid'])} rows of {self.args.prompts} prompts with n={self.args.n}")
        return len(rows.keys)

    def batch(self, run: int):
        """Return Countdown's prompts as the tensordict that verl's data loader makes."""
        from verl.utils.dataset.rl_dataset import collate_fn

        from verl.utils import tensordict_utils as tu

        draw, rows = random.Random(run), []
        for i in range(self.args.prompts):
            numbers = [draw.randint(1, 9) for _ in range(3)]
            question = f"{' '.join(map(str, numbers))} = {sum(numbers)}"
            row = rl_row("countdown", question, {"target": sum(numbers), "numbers": numbers}, "train", i)
            row |= {"raw_prompt": row.pop("prompt"), "index": i, "uid": str(uuid.uuid4())}
            rows.append(row | {"tools_kwargs": {}, "interaction_kwargs": {}})
        batch = tu.get_tensordict(collate_fn(rows))
        tu.assign_non_tensor_data(batch, "global_steps", run + 1)
        return batch


def launch(folder: Path, way: str, overrides: tuple[str, ...], run: int) -> pd.Series:
    """Run GRPO in a folder named after `way`; return by table column the CPU milliseconds per trajectory."""
    folder, steps = folder / f"{way}{run}", 8
    command = ["bash", "recipe/common/run_grpo_countdown.sh", f"trainer.total_training_steps={steps}", *overrides]
    command += ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    env = {**os.environ, "HARDWARE": "cpu", "EXPERIMENT_NAME": folder.name, "RUN_DIR": str(folder)}
    seconds, metrics = {}, folder / "metrics.jsonl"
    with subprocess.Popen(command, cwd=ROOT, env=env) as process:
        while process.poll() is None:
            time.sleep(0.1)
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if done and done not in seconds:
                seconds[done] = seconds_by_column(psutil.Process(process.pid))
    first, last = 2, max(step for step in seconds if step < steps)
    return 1000 * (seconds[last] - seconds[first]) / (128 * (last - first))


def estimate(frames: dict[str, pd.DataFrame]) -> str:
    """Return a table of each kind of process: its seconds for a large step, divided by the number of processes."""
    medians = {side: frame.median() for side, frame in frames.items() if side in (UPSTREAM, "plain")}
    rows = []
    for part, count in PROCESSES.items():
        costs = [median[part] for median in medians.values()]
        cells = [f"{ms:.2f} ms x {STEP:,} / {count} = {max(ms, 0) * STEP / 1000 / count:.1f} s" for ms in costs]
        rows.append([part, str(count), *cells])
    about = (
        f"Seconds = milliseconds per trajectory x {STEP:,} / 1000 / processes, at this machine's speed. The largest "
        "figure is the least time that a step's rollout takes, however fast the engine is."
    )
    title = f"## On paper: {NODES} nodes of 8 GPUs, {STEP:,} trajectories a step"
    return "\n".join([title, "", about, "", *table_lines(["processes", "how many", *medians], rows)])


def table_of(frames: dict[str, pd.DataFrame], apart: list[str]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows; the first side is the baseline. Columns in `apart` are shown, but are not in the sum."""
    totals = {side: frame[PARTS].sum(axis=1) for side, frame in frames.items()}
    baseline, rows = next(iter(totals.values())), []
    for side, total in totals.items():
        medians = frames[side][[*PARTS, *apart]].median()
        ranges = [with_range(total, ".1f"), f"{with_range(baseline / total, '.1f')} x"]
        rows.append([side, *ranges, *(f"{value:.2f}" for value in medians)])
    return ["side", "CPU ms per trajectory", "times less", *PARTS, *(f"apart: {name}" for name in apart)], rows


def main() -> None:
    parser = parser_of(__doc__, prompts=16, n=8, tokens=24, runs=5, launches=0)
    parser.add_argument("--sides", nargs="+", choices=(UPSTREAM, *TREES), default=[UPSTREAM, *TREES])
    args = parser.parse_args()
    os.environ |= VARIABLES
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(args.sides, Path(folder), args)
        sides = {side: partial(stack.run, side) for side in args.sides}
        in_turns(sides, 1)  # first calls
        frames = {side: pd.DataFrame(runs) for side, runs in in_turns(sides, args.runs).items()}
        ray.shutdown()
    what = (
        f"{args.prompts} prompts, n = {args.n}, {args.tokens} tokens; median of {args.runs} runs (range). Requests: to "
        f"the server, for each trajectory.\n\n{estimate(frames)}\n\n"
    )
    if args.launches:
        with tempfile.TemporaryDirectory() as folder:
            ways = {UPSTREAM: UPSTREAMS_WAY, "plain": ()}
            launches = {way: partial(launch, Path(folder), way, overrides) for way, overrides in ways.items()}
            launched = {way: pd.DataFrame(runs) for way, runs in in_turns(launches, args.launches).items()}
        lines = table_lines(*table_of(launched, ["server", "engine core", "trainer's worker"]))
        what += "## Whole runs of GRPO on Countdown\n\nAll of a step, with the idle processes.\n\n"
        what += "\n".join(lines) + "\n\n"
    table = table_of(frames, ["server", "requests"])
    write_report("trajectory_cost", what + "## Rollouts without an engine", *table)


if __name__ == "__main__":
    main()
