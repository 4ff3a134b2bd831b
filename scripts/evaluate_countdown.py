"""Evaluates a checkpoint on Countdown and writes outputs/results/<experiment>.log; scripts/eval-countdown.sh calls it.

    python scripts/evaluate_countdown.py EXPERIMENT_NAME [--step N] [--n 8] [--data FILE]
    python scripts/evaluate_countdown.py NAME --model PATH_TO_A_HUGGING_FACE_FOLDER

The model is the Hugging Face folder that the trainer saved (`hf_model` in checkpoint.save_contents); without one the
shards are merged first, to bfloat16 (kept beside them, made once). Sampling as in the trainer's validation: temperature
1, the whole distribution.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from recipe.common.results import EvalResult, format_result_lines, write_result_log


def checkpoint_model(experiment: str, step: int | None) -> tuple[Path, int]:
    """Hugging Face folder and step of a run's checkpoint; merges the trainer's shards where that is not done yet.

    Raises:
        SystemExit: the run has no such complete checkpoint.
    """
    from verl.trainer.checkpoint_marker import complete_steps

    run_dir = Path("outputs") / experiment
    steps = complete_steps(run_dir)
    if not steps or (step is not None and step not in steps):
        raise SystemExit(
            f"error: {run_dir} has no complete checkpoint{f' of step {step}' if step else ''}; it has {steps}"
        )
    step = steps[-1] if step is None else step
    saved_by_trainer = run_dir / f"global_step_{step}" / "actor" / "huggingface"
    if list(saved_by_trainer.glob("*.safetensors")):
        return saved_by_trainer, step
    merged = run_dir / f"global_step_{step}" / "merged"
    if not merged.exists():
        unfinished = merged.with_name(f"merged.tmp{os.getpid()}")
        merge = [sys.executable, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        merge += ["--local_dir", str(run_dir / f"global_step_{step}" / "actor"), "--target_dir", str(unfinished)]
        done = subprocess.run(merge, capture_output=True, text=True)
        if done.returncode:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise SystemExit(f"error: merging {run_dir}/global_step_{step} failed:\n{done.stderr[-2000:]}")
        os.replace(unfinished, merged)
    return merged, step


def generate(
    model: Path, questions: list[list[dict]], n: int, max_tokens: int, seed: int
) -> list[list[tuple[str, int]]]:
    """`n` (text, number of tokens) for each question, from vLLM in this process."""
    from vllm import LLM, SamplingParams

    on_cpu = os.environ.get("VERL_PLATFORM") == "cpu"
    # the same flag is a share of GPU memory there and of the machine's memory here
    options = {"dtype": "float32", "gpu_memory_utilization": 0.3, "enforce_eager": True} if on_cpu else {}
    llm = LLM(model=str(model), seed=seed, **options)
    sampling = SamplingParams(n=n, temperature=1.0, top_p=1.0, max_tokens=max_tokens, seed=seed)
    requests = llm.chat(questions, sampling, use_tqdm=True)
    return [[(sample.text, len(sample.token_ids)) for sample in request.outputs] for request in requests]


def measure(samples: list[list[tuple[str, int]]], ground_truths: list[dict]) -> dict[str, float]:
    """Accuracy as mean@n (which is Pass@1), best@n and maj@n, and the mean response length in tokens."""
    from verl.utils.reward_score.countdown import compute_score

    n = len(samples[0])
    right, best, majority, lengths = [], [], [], []
    for answers, truth in zip(samples, ground_truths, strict=True):
        verdicts = [compute_score("countdown", text, truth) for text, _ in answers]
        lengths += [length for _, length in answers]
        right.append(np.mean([verdict["acc"] for verdict in verdicts]))
        best.append(max(verdict["acc"] for verdict in verdicts))
        votes = Counter(verdict["pred"] for verdict in verdicts if verdict["pred"])
        elected = votes.most_common(1)[0][0] if votes else None
        majority.append(float(elected == str(truth["target"])))
    return {
        "Acc-Pass@1": float(np.mean(right)),
        f"Acc-Mean@{n}": float(np.mean(right)),
        f"Acc-Best@{n}": float(np.mean(best)),
        f"Acc-Maj@{n}": float(np.mean(majority)),
        "Response-Length-Mean": float(np.mean(lengths)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment")
    parser.add_argument("--step", type=int)
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--data", default="outputs/data/countdown/test.parquet")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--max-tokens", type=int, default=12 if os.environ.get("VERL_PLATFORM") == "cpu" else 1024)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not Path(args.data).exists():
        raise SystemExit(f"error: --data {args.data} does not exist: python -m recipe.common.countdown makes it")
    model, step = (args.model, None) if args.model else checkpoint_model(args.experiment, args.step)
    rows = pq.read_table(args.data).to_pylist()
    samples = generate(model, [row["prompt"] for row in rows], args.n, args.max_tokens, args.seed)
    result = EvalResult(
        experiment=args.experiment,
        step=step,
        dataset="countdown",
        n_samples=args.n,
        n_questions=len(rows),
        metrics=measure(samples, [row["reward_model"]["ground_truth"] for row in rows]),
    )
    lines = [f"model: {model}", f"data: {args.data}", *format_result_lines([result])]
    log = Path("outputs/results") / f"{args.experiment}.log"
    write_result_log(log, lines)
    print("\n".join(lines))
    print(f"written to {log}")


if __name__ == "__main__":
    main()
