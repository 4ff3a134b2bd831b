"""The last screen of scripts/quickstart.sh: its figures are counted by hand from metrics and evaluation logs."""

import json
from pathlib import Path

import pytest

from recipe.common.reporting.score_and_cost import main
from verl.evaluation.scores.results import EvalResult, format_result


def evaluation_log(folder: Path, accuracy: float, **metrics: float) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {"Acc-Pass@1": accuracy, "Acc-Best@8": 0.9} | {f"Acc-Pass@1-{end}": v for end, v in metrics.items()}
    result = EvalResult(experiment="a", step=3, dataset="countdown", n_samples=8, n_questions=4, metrics=metrics)
    (folder / "eval.log").write_text("\n".join(["free text", *format_result(result)]))
    return str(folder / "eval.log")


def run_of(folder: Path, steps: list[dict]) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, "data": data}) for step, data in enumerate(steps)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def grpo_step(tokens: float, seconds: float, unique: float = 0.5, trained: float = 0.8) -> dict:
    shares = {"perf/unique_token_share": unique, "perf/trained_token_share": trained}
    return {"tree/tokens_generated": tokens, "tree/prompts": 4, "timing_s/step": seconds, **shares}


def test_the_table_tells_scores_and_costs(tmp_path, capsys):
    warm = run_of(tmp_path / "warm", [{"train/loss": 1.0}])
    # 4 prompts x (100 + 200 + 300 + 400) tokens; the first two steps' seconds are start-up; shares 0.4, 0.4, 0.4, 0.2
    steps = [grpo_step(100, 50), grpo_step(200, 9), grpo_step(300, 1), grpo_step(400, 2, unique=0.25)]
    grpo = run_of(tmp_path / "grpo", [{"val-core/countdown/acc/mean@8": 0.1}, *steps])
    rows = [{k: v for k, v in step.items() if "share" not in k} for step in steps[-1:]]
    hapo = run_of(tmp_path / "hapo", [row | {"training/filter_groups/evicted_samples": 2} for row in rows])
    main(
        ["--model", "warm start", evaluation_log(tmp_path / "warm", 0.125, Low=0.1, High=0.15), warm]
        + ["--model", "GRPO", evaluation_log(tmp_path / "grpo", 0.25, Low=0.2, High=0.3), grpo]
        + ["--model", "HAPO", evaluation_log(tmp_path / "hapo", 0.5), hapo]
    )
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split("   ")[0] == "model" and header.endswith("seconds a step")
    cells = [[cell.strip() for cell in line.split("   ") if cell.strip()] for line in lines]
    assert cells == [
        ["warm start", "0.125 (0.100 to 0.150)", "-", "-", "-"],
        ["GRPO", "0.250 (0.200 to 0.300)", "4,000", "35%", "1.5"],
        ["HAPO", "0.500", "2,400", "100%", "2.0"],  # (4 + 2 dropped) prompts x 400 tokens
    ]
    assert len({len(line) for line in [header, *lines]}) == 1, "columns are aligned"


def test_a_log_without_a_result_is_named(tmp_path):
    (tmp_path / "eval.log").write_text("killed\n")
    with pytest.raises(SystemExit, match=r"eval\.log: no lines like RESULT"):
        main(["--model", "GRPO", str(tmp_path / "eval.log"), str(tmp_path)])
    with pytest.raises(SystemExit, match=r"nothing\.log"):
        main(["--model", "GRPO", str(tmp_path / "nothing.log"), str(tmp_path)])
