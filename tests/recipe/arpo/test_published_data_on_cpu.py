"""The authors' data files are trained on as they are: the row's ability chooses the reward."""

import asyncio
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
from verl.utils.dataset.rl_dataset import RLHFDataset

from recipe.common.tiny_model import make_tokenizer
from tests.configs import composed
from verl.trainer.checks.rows import check_data_files, check_reward_rows
from verl.workers.rollout.rows import reward_batch

# the columns and types of the authors' ARPO-RL-Reasoning-10K, which cannot be downloaded by the tests
SYSTEM = (
    "Think between <think> and </think>. Search by <search>query</search> and compute by <python>code</python>; what "
    r"they return stands between <result> and </result>. End with <answer>\boxed{the answer}</answer>."
)
MESSAGE = pa.struct([("content", pa.string()), ("role", pa.string())])
REWARD = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
EXTRA = [("index", pa.int64()), ("need_tools_kwargs", pa.bool_()), ("question", pa.string()), ("split", pa.string())]
COLUMNS = [("data_source", pa.string()), ("prompt", pa.list_(MESSAGE)), ("ability", pa.string())]
COLUMNS += [("reward_model", REWARD), ("extra_info", pa.struct(EXTRA)), ("metadata", pa.null())]
QUESTIONS = [("What is 1/4 + 1/4?", r"\frac{1}{2}", "math"), ("Who was the 44th president?", "Barack Obama", "qa")]


def write_published(path: Path, *more: tuple[str, str, str | None]) -> str:
    """Write a row of mathematics, a question, and `more` rows; return the path."""
    rows = [
        {
            "data_source": "train",
            "prompt": [{"content": SYSTEM, "role": "system"}, {"content": question, "role": "user"}],
            "ability": ability,
            "reward_model": {"ground_truth": answer, "style": "rule"},
            "extra_info": {"index": index, "need_tools_kwargs": True, "question": question, "split": "train"},
        }
        for index, (question, answer, ability) in enumerate([*QUESTIONS, *more])
    ]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema(COLUMNS)), path)
    return str(path)


def arpo_config(file: str, *overrides: str):
    files = [f"data.train_files={file}", f"data.val_files={file}"]
    return composed("arpo_trainer", "task=reasoning", *files, *overrides, recipe="arpo")


def test_the_rows_are_accepted_and_a_row_of_neither_kind_is_named_by_its_number(tmp_path):
    config = arpo_config(write_published(tmp_path / "train_10k.parquet"))
    check_data_files("data.train_files", config.data.train_files, config.data.prompt_key)
    check_reward_rows(config)
    for ability in ("code", None):
        file = write_published(tmp_path / "other.parquet", ("Print 1.", "print(1)", ability))
        with pytest.raises(ValueError, match=f"other.parquet: row 2: .*ability='?{ability}'?: neither tells"):
            check_reward_rows(arpo_config(file))
        check_reward_rows(arpo_config(file, "reward.custom_reward_function.reward_kwargs.rule=em"))


def test_every_row_is_scored_by_the_rule_of_its_ability(tmp_path):
    """Upstream's data set reads the file, and upstream's reward worker scores answers to its rows."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    file = write_published(tmp_path / "train_10k.parquet")
    config = arpo_config(file, f"actor_rollout_ref.model.path={tmp_path}")
    data = OmegaConf.create({"max_prompt_length": 1024, "filter_overlong_prompts": True, "cache_dir": str(tmp_path)})
    rows = RLHFDataset(file, tokenizer, data)

    async def scores(row: dict, *answers: str) -> list[float]:
        worker, outputs = RewardLoopWorker(config), []
        for answer in answers:
            response = tokenizer.encode(rf"<think>t</think><answer>\boxed{{{answer}}}</answer>")
            more = {"extra_fields": {}, "num_turns": 2, "metrics": AgentLoopMetrics()}
            outputs.append(
                AgentLoopOutput(prompt_ids=[3], response_ids=response, response_mask=[1] * len(response), **more)
            )
        results = await worker.compute_score_batch(reward_batch(outputs, row | {"uid": "0"}))
        return [result["reward_score"] for result in results]

    mathematics, question = rows[0], rows[1]
    # Equivalent mathematics is right; half of the words have an F1 of 2 * 1 / (1 + 2). The format gives 0.2.
    assert asyncio.run(scores(mathematics, "0.5", "0.4")) == pytest.approx([1.0, 0.2])
    assert asyncio.run(scores(question, "Obama", "0.5")) == pytest.approx([0.2 + 0.8 * 2 / 3, 0.2])
    assert mathematics["extra_info"].keys() == {"index", "need_tools_kwargs", "question", "split"}, "left as it was"
