"""CPU time per trajectory of everything in a rollout but the engine: upstream's path, and ours with each tree.

    VERL_PLATFORM=cpu python -m benchmarks.trajectory_cost [--prompts 16] [--n 8] [--tokens 24] [--launches 1]

The rollout's part of the stack is real: Ray, TransferQueue, the load balancer, agent-loop and reward-loop workers. The
rollout server is an actor that answers at once with random tokens. A run submits prompts as upstream's trainer does,
waits for them in upstream's replay buffer, reads the columns that a step reads, and clears them. Each side has an
agent-loop worker of its own, and the sides take turns. CPU time is user and system time of all processes, from /proc;
the server's is told apart, and what the idle processes use in as much time is taken off.

`--launches` are whole runs of GRPO on Countdown by upstream's manager and by ours, in turns: CPU time of a step by
process, between the second step and the last but one. Writes benchmarks/results/trajectory_cost.md.
"""

import os
import random
import statistics
import subprocess
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import psutil
import ray
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf

import verl.trainer
from benchmarks.report import in_turns, parser_of, with_range, write_report
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.utils.parts import load_choices
from verl.workers.rollout.engines.request_batching import ExchangeServer

CONFIGS = Path(__file__).resolve().parents[1] / "recipe/common/config"
UPSTREAM = "upstream"
SMALL = {
    "arpo": {"initial_rollouts": 4, "entropy_tokens": 4, "max_turn_tokens": 8, "turn_delimiter": "1"},
    "eptree": {"custom": {"eptree": {"M": 2, "N": 3, "L": 1, "T": 1}}},
    "tree_grpo": {"custom": {"tree_grpo": {"M": 2, "N": 3, "L": 1, "step_delimiter": "1"}}},
    "latr": {"kt": {"chunk_size": 4, "prob_filter_abs_thres": 0.1, "prob_filter_rel_thres": 0.4}},
}
TREES = ("plain", "latr", "arpo", "hato", "over_generation", "eptree", "tree_grpo")
# processes by the beginning of their names: in whose column their seconds are
COLUMNS = {
    "ray::GroupAgentLoopWorker": "agent loop",
    "ray::AgentLoopWorker": "agent loop",
    "ray::RewardLoopWorker": "reward loop",
    "ray::TransferQueueController": "controller",
    "ray::SimpleStorageUnit": "storage",
    "ray::GlobalRequestLoadBalancer": "balancer",
    "ray::StubServer": "server",
}
PARTS = ("driver", "agent loop", "reward loop", "controller", "storage", "balancer", "Ray")
VARIABLES = {"VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
VARIABLES |= {"TQ_NUM_THREADS": "1", "TRANSFER_QUEUE_ENABLE": "1"}
# of the paper estimate: nodes, trajectories a step, and how many processes a run on GPUs has of each kind
NODES, STEP = 8, 8192
PROCESSES = {
    "driver": 1,
    "controller": 1,
    "balancer": 1,
    "storage": 8,
    "agent loop": 8 * NODES,
    "reward loop": 8 * NODES,
}
READ = ("responses", "response_mask", "rm_scores", "rollout_log_probs", "uid", "extra_fields")


def answer(prompt_ids: list[int], params: dict, vocabulary: int, stop_token_ids: list[int]):
    """A server's output: as many random tokens as are asked for, the last of which may end the response."""
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
    """Upstream's rollout server, and `TopLogprobsServer`'s collected requests, without an engine."""

    def __init__(self, vocabulary: int, stop_token_ids: list[int], response_length: int):
        self.vocabulary, self.stop_token_ids, self.response_length = vocabulary, stop_token_ids, response_length
        self.requests = 0

    async def generate(self, prompt_ids, sampling_params, request_id, **_):
        self.requests += 1
        sampling_params.setdefault("max_tokens", self.response_length)
        return answer(prompt_ids, sampling_params, self.vocabulary, self.stop_token_ids)

    async def count(self) -> int:
        return self.requests


def config_of(tree: str, folder: Path, args) -> DictConfig:
    """A run's config with this tree; `upstream`: none."""
    search = f"hydra.searchpath=[file://{Path(verl.trainer.__path__[0]) / 'config'}]"
    chosen = ["tree=plain", "actor_rollout_ref.rollout.tree=null"] if tree == UPSTREAM else [f"tree={tree}"]
    load_choices()
    with initialize_config_dir(str(CONFIGS), version_base=None):
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


def seconds_by_column(root: psutil.Process, more: dict[str, str]) -> dict[str, float]:
    """CPU seconds so far of a process, the driver, and its descendants.

    Args:
        more: columns beside `COLUMNS`.
    """
    seconds, columns = defaultdict(float), COLUMNS | more
    for process in (root, *root.children(recursive=True)):
        try:
            name, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        column = next((column for prefix, column in columns.items() if name.startswith(prefix)), "Ray")
        seconds["driver" if process == root else column] += times.user + times.system
    return seconds


class Stack:
    """A local Ray with everything that the sides share, and an agent-loop manager for each of them."""

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

    def run(self, side: str, run: int) -> dict[str, float]:
        """CPU milliseconds for each trajectory by column, with `requests` to the server and `wall` milliseconds."""
        time.sleep(0.5)
        idle = seconds_by_column(psutil.Process(), {})
        time.sleep(1)
        asked, before, started = (
            ray.get(self.server.count.remote()),
            seconds_by_column(psutil.Process(), {}),
            time.perf_counter(),
        )
        rows = self.step(side, run)
        wall, after = time.perf_counter() - started, seconds_by_column(psutil.Process(), {})
        idle = {name: before[name] - seconds for name, seconds in idle.items()}
        used = {name: after[name] - before[name] - idle.get(name, 0.0) * wall for name in after}
        used |= {"wall": wall, "requests": (ray.get(self.server.count.remote()) - asked) / 1000}
        return Counter({name: 1000 * seconds / rows for name, seconds in used.items()})

    def step(self, side: str, run: int) -> int:
        """What a trainer does with a batch before and after the model's own work; returns how many rows it had."""
        batch = self.batch(run)
        tags = [{"is_prompt": True, "status": "pending", "global_steps": run + 1} for _ in range(len(batch))]
        self.tq.kv_batch_put(keys=list(batch["uid"]), partition_id="train", tags=tags)
        self.managers[side].generate_sequences(batch)
        rows, _ = self.buffer.sample(global_steps=run + 1, partition_id="train", batch_size=self.args.prompts)
        data = self.tq.kv_batch_get(keys=rows.keys, partition_id="train", select_fields=list(READ))
        self.tq.kv_clear(keys=rows.keys, partition_id="train")
        if not 0 < len(data["uid"]) <= self.args.prompts * self.args.n:
            raise RuntimeError(f"{side}: {len(data['uid'])} rows of {self.args.prompts} prompts with n={self.args.n}")
        return len(rows.keys)

    def batch(self, run: int):
        """Prompts of Countdown, as the data loader gives them."""
        from verl.utils import tensordict_utils as tu

        draw, columns = random.Random(run), defaultdict(list)
        for i in range(self.args.prompts):
            numbers = [draw.randint(1, 9) for _ in range(3)]
            columns["data_source"].append("countdown")
            columns["raw_prompt"].append(
                [{"role": "user", "content": f"{' '.join(map(str, numbers))} = {sum(numbers)}"}]
            )
            columns["ability"].append("math")
            columns["reward_model"].append(
                {"style": "rule", "ground_truth": {"target": sum(numbers), "numbers": numbers}}
            )
            columns["extra_info"].append({"split": "train", "index": i})
            columns["index"].append(i)
            columns["tools_kwargs"].append({})
            columns["interaction_kwargs"].append({})
            columns["uid"].append(str(uuid.uuid4()))
        arrays = {name: np.empty(len(values), dtype=object) for name, values in columns.items()}
        for name, values in columns.items():
            arrays[name][:] = values
        batch = tu.get_tensordict(arrays)
        tu.assign_non_tensor_data(batch, "global_steps", run + 1)
        return batch


def estimate(results: dict[str, list[dict[str, float]]]) -> str:
    """Seconds that the processes of each kind work for a large step, if they share it evenly, as a table."""
    sides = [side for side in results if side in (UPSTREAM, "plain")]
    lines = [
        f"## On paper: {NODES} nodes of 8 GPUs, {STEP:,} trajectories a step",
        "",
        f"Seconds = milliseconds per trajectory x {STEP:,} / 1000 / processes, at this machine's speed. The largest "
        "figure is the least time that a step's rollout takes, however fast the engine is.",
        "",
        "| processes | how many | " + " | ".join(sides) + " |",
        "|" + " --- |" * (2 + len(sides)),
    ]
    for part, count in PROCESSES.items():
        medians = [statistics.median(run[part] for run in results[side]) for side in sides]
        cells = [f"{ms:.2f} ms x {STEP:,} / {count} = {max(ms, 0) * STEP / 1000 / count:.1f} s" for ms in medians]
        lines.append(f"| {part} | {count} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


# ---- whole runs ----

ROOT = Path(__file__).resolve().parents[1]
# manager and servers
UPSTREAMS_WAY = (
    "actor_rollout_ref.rollout.agent.agent_loop_manager_class=null",
    "ray_kwargs.ray_init.runtime_env.env_vars.VERL_SHARED_CALLS='0'",
)
ENGINE = {"VLLM::EngineCore": "engine core", "ray::WorkerDict": "trainer's worker", "ray::vLLMHttpServer": "server"}
ENGINE |= {"ray::TopLogprobsServer": "server", "ray::TaskRunner": "driver"}


def launch(folder: Path, *overrides: str, steps: int = 8) -> dict[str, float]:
    """CPU milliseconds for each trajectory of a run of GRPO, by column."""
    never = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    command = [
        "bash",
        "recipe/common/run_grpo_countdown.sh",
        f"trainer.total_training_steps={steps}",
        *never,
        *overrides,
    ]
    env = {**os.environ, "HARDWARE": "cpu", "EXPERIMENT_NAME": folder.name, "RUN_DIR": str(folder)}
    looks, metrics = {}, folder / "metrics.jsonl"
    with subprocess.Popen(command, cwd=ROOT, env=env) as run:
        while run.poll() is None:
            time.sleep(0.1)
            done = len(metrics.read_text().splitlines()) if metrics.exists() else 0
            if done and done not in looks:
                looks[done] = seconds_by_column(psutil.Process(run.pid), ENGINE)
    first, last = 2, max(step for step in looks if step < steps)
    rows = 128 * (last - first)
    return Counter({name: 1000 * (looks[last][name] - looks[first][name]) / rows for name in looks[last]})


def of_all(run: dict[str, float]) -> float:
    return sum(run[part] for part in PARTS)


def row_of(side: str, runs: list[dict[str, float]], baseline: list[dict[str, float]], apart: list[str]) -> list[str]:
    ratios = [of_all(theirs) / of_all(mine) for mine, theirs in zip(runs, baseline, strict=True)]
    columns = (statistics.median(run[part] for run in runs) for part in (*PARTS, *apart))
    return [
        side,
        with_range([of_all(run) for run in runs], ".1f"),
        f"{with_range(ratios, '.1f')} x",
        *(f"{value:.2f}" for value in columns),
    ]


def table_of(results: dict[str, list[dict[str, float]]], apart: list[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows; the first side is the baseline."""
    baseline = next(iter(results.values()))
    header = ["side", "CPU ms per trajectory", "times less", *PARTS, *(f"apart: {name}" for name in apart)]
    return header, [row_of(side, runs, baseline, apart) for side, runs in results.items()]


def main() -> None:
    parser = parser_of(__doc__, prompts=16, n=8, tokens=24, runs=5, launches=0)
    parser.add_argument("--sides", nargs="+", choices=(UPSTREAM, *TREES), default=[UPSTREAM, *TREES])
    args = parser.parse_args()
    os.environ |= VARIABLES
    with tempfile.TemporaryDirectory() as folder:
        stack = Stack(args.sides, Path(folder), args)
        sides = {side: lambda run, side=side: stack.run(side, run) for side in args.sides}
        in_turns(sides, 1)  # first calls
        results = in_turns(sides, args.runs)
        ray.shutdown()
    write_page(args, results, {})
    if args.launches:
        with tempfile.TemporaryDirectory() as folder:
            ways = {UPSTREAM: UPSTREAMS_WAY, "plain": ()}
            launches = {
                way: lambda run, way=way, more=more: launch(Path(folder) / f"{way}{run}", *more)
                for way, more in ways.items()
            }
            write_page(args, results, in_turns(launches, args.launches))


def write_page(args, results: dict[str, list], launched: dict[str, list]) -> None:
    what = (
        f"{args.prompts} prompts, n = {args.n}, {args.tokens} tokens; median of {args.runs} runs (range). Requests: to "
        f"the server, for each trajectory.\n\n{estimate(results)}\n\n"
    )
    if launched:
        header, rows = table_of(launched, ["server", "engine core", "trainer's worker"])
        lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
        what += "## Whole runs of GRPO on Countdown\n\nAll of a step, with the idle processes.\n\n"
        what += "\n".join(lines) + "\n\n"
    header, rows = table_of(results, ["server", "requests"])
    write_report("trajectory_cost", what + "## Rollouts without an engine", header, rows)


if __name__ == "__main__":
    main()
