"""Evaluation on one server: samples a second against sequential requests and against vLLM's own benchmark client.

    python -m benchmarks.evaluation_throughput [--questions 64] [--n 16] [--tokens 64] [--runs 3]

Baselines, on the same server (tiny model, random weights, so that few answers end early) and prompts: the same requests
one after the other (a sixteenth of them), and `vllm bench serve`, which sends all at once. The evaluation's time is all
of it: reading the questions, asking, scoring, a line on the disk for each sample, bootstrap, log. Runs take turns.
Writes benchmarks/results/evaluation_throughput.md.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pandas as pd
from hydra import compose, initialize_config_dir
from transformers import AutoTokenizer

from benchmarks.report import in_turns, parser_of, with_range, write_report
from recipe.common.countdown import CountdownConfig, write_countdown
from recipe.common.tiny_model import write_tiny_model
from verl.evaluation.main import evaluate
from verl.evaluation.server import client_of, serving

ROOT = Path(__file__).resolve().parents[1]
SEQUENTIAL_SHARE = 16


def evaluated(folder: Path, url: str, n: int, tokens: int, run: int) -> tuple[float, int]:
    """Seconds and generated tokens of one evaluation."""
    settings = ["benchmark=countdown", f"experiment=run{run}", f"files=[{folder}/test.parquet]", f"n={n}"]
    settings += ["temperature=1.0", "top_p=1.0", "top_k=-1", f"max_tokens={tokens}", f"seed={run}"]
    settings += [f"server.url={url}", f"server.tokenizer={folder}/model", f"output_dir={folder}/results"]
    with initialize_config_dir(str(ROOT / "recipe/common/config"), version_base=None):
        config = compose("evaluate", settings)
    start = time.perf_counter()
    evaluate(config)
    seconds = time.perf_counter() - start
    rows = [json.loads(line) for line in (folder / f"results/run{run}/countdown.jsonl").read_text().splitlines()[1:]]
    return seconds, sum(row["tokens"] for row in rows)


def one_by_one(url: str, model: str, prompts: list[str], tokens: int) -> tuple[float, int]:
    async def ask() -> int:
        client, made = client_of(url), 0
        for prompt in prompts:
            reply = await client.completions.create(model=model, prompt=prompt, max_tokens=tokens, temperature=1.0)
            made += reply.usage.completion_tokens
        return made

    start = time.perf_counter()
    made = asyncio.run(ask())
    return time.perf_counter() - start, made


def benched(url: str, model: str, file: Path, n_prompts: int, tokens: int, seed: int) -> tuple[float, int]:
    """Seconds and generated tokens by vLLM's client's own clock."""
    command = [sys.executable, "-m", "vllm_patches", "bench", "serve"]
    command += ["--backend", "vllm", "--endpoint", "/v1/completions", "--base-url", url]
    command += ["--model", model, "--dataset-name", "custom", "--dataset-path", str(file), "--skip-chat-template"]
    command += ["--num-prompts", str(n_prompts), "--custom-output-len", str(tokens), "--max-concurrency", "256"]
    command += ["--temperature", "1.0", "--seed", str(seed), "--disable-tqdm", "--num-warmups", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    names = (r"Successful requests", r"Benchmark duration \(s\)", r"Total generated tokens")
    figures = [re.search(rf"{name}:\s+([\d.]+)", done.stdout) for name in names]
    if None in figures or int(figures[0][1]) != n_prompts:
        raise RuntimeError(done.stdout + done.stderr)
    return float(figures[1][1]), int(figures[2][1])


def measure(folder: Path, args) -> dict[str, list[tuple[float, int]]]:
    """Seconds and generated tokens of each run, by what asked."""
    write_countdown(folder, CountdownConfig(train_size=1, test_size=args.questions, demo_size=0))
    model = str(write_tiny_model(folder / "model"))
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = pd.read_parquet(folder / "test.parquet")["prompt"]
    prompts = [tokenizer.apply_chat_template(list(row), add_generation_prompt=True, tokenize=False) for row in rows]
    file = folder / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts * args.n))
    total = args.questions * args.n
    sample = (prompts * args.n)[: total // SEQUENTIAL_SHARE]
    with serving(model, folder / "server.txt", ["--dtype", "float32", "--max-num-seqs", "256"]) as url:
        evaluated(folder, url, 1, args.tokens, args.runs)  # warm-up
        sides = {
            "vllm bench serve": lambda run: benched(url, model, file, total, args.tokens, run),
            "one after the other": lambda run: one_by_one(url, model, sample, args.tokens),
            "evaluation": lambda run: evaluated(folder, url, args.n, args.tokens, run),
        }
        return in_turns(sides, args.runs)


def main() -> None:
    args = parser_of(__doc__, questions=64, n=16, tokens=64, runs=3).parse_args()
    os.environ.setdefault("VERL_PLATFORM", "cpu")
    with tempfile.TemporaryDirectory(prefix="evaluation") as folder:
        results = measure(Path(folder), args)
    rates = {name: [made / seconds for seconds, made in runs] for name, runs in results.items()}
    limit = statistics.median(rates["vllm bench serve"])
    table = []
    for name, runs in results.items():
        ratio = statistics.median(rates[name]) / limit
        seconds = ", ".join(f"{seconds:.1f}" for seconds, _ in runs)
        table.append((name, with_range(rates[name], ",.0f"), f"{ratio:.2f}", seconds))
    write_report(
        "evaluation_throughput",
        f"{args.questions} questions x {args.n} samples of up to {args.tokens} tokens; one server, {args.runs} runs in "
        "turns. Generated tokens a second, median (least to greatest); the ratio is to vLLM's client. One after the "
        f"other: 1 in {SEQUENTIAL_SHARE} of the requests.",
        ("", "tokens/s", "ratio", "seconds of each run"),
        table,
    )


if __name__ == "__main__":
    main()
