"""Prompt groups and validation samples in real trackers, read back from what wandb, TensorBoard and MLflow wrote.

wandb is offline, and MLflow writes into a folder. Its package is no dependency here: tests fetch it.
"""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import wandb
from omegaconf import OmegaConf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.tracking import Tracking, ValidationGenerationsLogger

from tests.configs import composed
from tests.packages import unpacked
from tests.trackers import wandb_history
from tests.trainer.ppo.toy_step import MemoryQueue, trainer_of
from verl.trainer.ppo.group_table import (
    COLUMNS,
    GroupTableKeys,
    mean_rewards,
    segment_heights,
    shortened,
    tree_picture,
)
from verl.workers.config.keys import read_keys

MLFLOW = ("mlflow-skinny==3.17.2", "sqlparse==0.6.1", "databricks-sdk==0.162.0")
# What the model may write: it must stay text.
TEXTS = {3: "3 4 = 7 ", 10: "<b>x</b>", 11: "\n\n# y\r| z |", 12: "w" * 500}
SAMPLES = (["3 4 = 7", "1 2 = 3"], ["3+4 <b>x</b>", "1+2"], [1.0, 0.0])


class Tokenizer:
    def decode(self, ids):
        return "".join(TEXTS[token] for token in ids)


def run_of(folder: Path, tracker: str):
    """A trainer in its first step, with this tracker, whose trees are written."""
    made = trainer_of(
        {
            "trainer.tree_freq": 1,
            "trainer.tree_prompts": 4,
            "trainer.group_table": {"prompts": 3, "responses": 2, "characters": 100},
            "trainer.logger": ["console", tracker],
            "trainer.log_val_generations": 2,
            "trainer.default_local_dir": str(folder),
            "algorithm.adv_estimator": "grpo",
            "algorithm.norm_adv_by_std_in_grpo": False,
        }
    )
    made.tokenizer = Tokenizer()
    made.logger = Tracking("project", "experiment", made.config.trainer.logger, OmegaConf.to_container(made.config))
    made.validation_generations_logger = ValidationGenerationsLogger("project", "experiment")
    return made


def train_and_validate(made, monkeypatch) -> None:
    """A step of two updates, with four prompts of three responses, and its validation."""
    queue = MemoryQueue(monkeypatch)
    for i in range(4):
        for session, reward in enumerate([1.0, 0.0, 0.5]):
            responses = [10, 11, 12] if (i, session) == (0, 1) else [10] * (session + 1)
            queue.add(f"g{i}_{session}_0", reward, [1] * len(responses), i, responses=responses)

    def step(self, metrics, timing_raw):
        for names in (["g0", "g1"], ["g2", "g3"]):
            self._compute_advantage(queue.batch(*names), metrics)
        return KVBatchMeta(keys=[], tags=[], partition_id="train")

    monkeypatch.setattr(PPOTrainer, "step", step)
    made.step({}, {})
    made._maybe_log_val_generations(*SAMPLES)
    made.logger.log({"actor/entropy": 0.5}, step=1)
    made._close_trackers(exit_code=0)


def table_of(folder: Path) -> list[list]:
    """The table by hand: three prompts of the four, two responses of each, 100 characters of the long one."""
    long = "<b>x</b>\n\n# y\r| z |" + "w" * 31 + " […419 characters…] " + "w" * 50
    rows = []
    for number in (1, 2, 3):
        texts = ["<b>x</b>", long if number == 1 else "<b>x</b>" * 2]
        for leaf, (text, reward, advantage) in enumerate(zip(texts, [1.0, 0.0], [0.5, -0.5], strict=True), start=1):
            page = f"{folder}/trees.html#step=1&prompt={number}&leaf={leaf}"
            rows.append([1, number, "3 4 = 7 ", text, reward, advantage, page])
    return rows


def pictures_of(folder: Path) -> list[np.ndarray]:
    lines = (folder / "trees/step_000001.jsonl").read_text().splitlines()
    assert len(lines) == 4
    return [tree_picture(json.loads(line)) for line in lines[:3]]


def read_png(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path))


@pytest.mark.slow
def test_wandb_has_the_table_with_pictures_and_the_validations_samples(tmp_path, monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    train_and_validate(run_of(tmp_path, "wandb"), monkeypatch)
    wandb.teardown()  # ends wandb's own process, which writes the log
    (run,) = tmp_path.glob("wandb/offline-run-*")
    history = wandb_history(run)
    assert [record["_step"] for record in history] == [1] and history[0]["actor/entropy"] == 0.5
    table = json.loads((run / "files" / history[0]["tree/prompt_groups.path"]).read_text())
    assert table["columns"] == list(COLUMNS) and table["data"] == table_of(tmp_path)
    assert history[0]["tree/pictures.captions"] == ["prompt 1", "prompt 2", "prompt 3"]
    shown = [read_png(run / "files" / name) for name in history[0]["tree/pictures.filenames"]]
    assert np.array_equal(shown, pictures_of(tmp_path))
    samples = json.loads((run / "files" / history[0]["val/generations.path"]).read_text())
    assert sorted(samples["data"][0][1:], key=str) == sorted(sum(SAMPLES, []), key=str)


def test_tensorboard_has_the_groups_as_text_and_the_pictures(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "tensorboard"))
    train_and_validate(run_of(tmp_path, "tensorboard"), monkeypatch)
    events = [EventAccumulator(str(file)).Reload() for file in (tmp_path / "tensorboard").iterdir()]
    texts = {tag: read_text(each, tag) for each in events for tag in each.Tags()["tensors"]}
    page = markdown_to_safe_html(texts["tree/prompt_groups/text_summary"])
    assert page.count("<h2>") == 3 and "<h1>" not in page and "<b>x" not in page
    assert page.count("<pre><code>&lt;b&gt;x&lt;/b&gt;\n</code></pre>") == 3 and "\n# y\n| z |" in page
    assert page.count("<strong>reward 1, advantage 0.5</strong>") == 3
    assert f"{tmp_path}/trees.html#step=1&amp;prompt=3&amp;leaf=2" in page and "prompt=4" not in page
    for number, expected in enumerate(pictures_of(tmp_path), start=1):
        (image,) = next(each for each in events if each.Tags()["images"]).Images(f"tree/picture_{number}")
        (tmp_path / "shown.png").write_bytes(image.encoded_image_string)
        assert image.step == 1 and np.array_equal(read_png(tmp_path / "shown.png"), expected)
    assert "**Input:** 3 4 = 7" in texts["val/generations/text_summary"]


def read_text(events: EventAccumulator, tag: str) -> str:
    (event,) = events.Tensors(tag)
    assert event.step == 1
    return event.tensor_proto.string_val[0].decode()


@pytest.fixture
def mlflow_files(tmp_path, monkeypatch):
    """MLflow can be imported, and writes its files below the test's folder."""
    for requirement in MLFLOW:
        monkeypatch.syspath_prepend(str(unpacked(requirement, metadata=True)))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_files")
def test_mlflow_has_the_table_and_the_pictures(tmp_path, monkeypatch, caplog):
    train_and_validate(run_of(tmp_path, "mlflow"), monkeypatch)
    (artifacts,) = tmp_path.glob("mlruns/*/*/artifacts")
    table = json.loads((artifacts / "prompt_groups/step_000001.json").read_text())
    assert table == {"columns": list(COLUMNS), "data": table_of(tmp_path)}
    for number, expected in enumerate(pictures_of(tmp_path), start=1):
        picture = read_png(artifacts / f"prompt_groups/step_000001_tree_{number}.png")
        assert np.array_equal(picture, expected)
    samples = json.loads((artifacts / "val_step1.json").read_text())
    assert {"input": "3 4 = 7", "output": "3+4 <b>x</b>", "score": 1.0} in samples
    assert (artifacts.parent / "metrics/actor/entropy").read_text().split()[1:] == ["0.5", "1"]


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_files")
def test_an_mlflow_that_takes_nothing_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    made = run_of(tmp_path, "mlflow")
    (artifacts,) = tmp_path.glob("mlruns/*/*/artifacts")
    artifacts.rmdir()
    artifacts.write_text("a file, in which no folder can be made")
    train_and_validate(made, monkeypatch)
    assert "step 1: MLflow did not take the prompt groups: " in caplog.text
    assert "a tracker of trainer.logger could not be closed: " in caplog.text


def attempt(folder: Path, tracker: str, rate: float) -> None:
    """An attempt of a run, which leaves a checkpoint."""
    trainer = {"default_local_dir": str(folder), "resume_mode": "auto", "learning_rate": rate}
    environment = {"env_vars": {"HF_TOKEN": "s3cr3t-1", "LOCAL_RANK": "s3cr3t-2"}}
    config = {"trainer": trainer, "ray_kwargs": {"runtime_env": environment}, "search": [{"api_key": "s3cr3t-3"}]}
    tracking = Tracking("project", "experiment", [tracker], config)
    tracking.log({"loss": rate}, step=int(10 * rate))
    tracking.finish()
    (folder / "latest_checkpointed_iteration.txt").write_text("1")


def no_secrets(folder: Path) -> bool:
    return not [file for file in folder.rglob("*") if file.is_file() and b"s3cr3t" in file.read_bytes()]


@pytest.mark.slow
def test_wandb_goes_on_in_one_run_without_secrets(tmp_path, monkeypatch):
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    for rate in (0.1, 0.2):
        attempt(tmp_path, "wandb", rate)
        wandb.teardown()  # An attempt is a process: wandb reads its variables once.
    run_id = json.loads((tmp_path / "trackers.json").read_text())["WANDB_RUN_ID"]
    folders = list(tmp_path.glob("wandb/offline-run-*"))
    assert len(folders) == 2 and all(f"-{run_id}" in folder.name for folder in folders)
    assert no_secrets(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    attempt(tmp_path, "wandb", 0.1)
    assert json.loads((tmp_path / "trackers.json").read_text())["WANDB_RUN_ID"] != run_id, "it began anew"


@pytest.mark.slow
@pytest.mark.usefixtures("mlflow_files")
def test_mlflow_goes_on_in_one_run_with_a_changed_key(tmp_path, caplog):
    attempt(tmp_path, "mlflow", 0.1)
    attempt(tmp_path, "mlflow", 0.2)
    (losses,) = tmp_path.glob("mlruns/*/*/metrics/loss")
    assert [line.split()[1:] for line in losses.read_text().splitlines()] == [["0.1", "1"], ["0.2", "2"]]
    assert "MLflow keeps the run's first values of trainer/learning_rate, which have changed" in caplog.text
    assert no_secrets(tmp_path)


def test_a_shortened_text_keeps_its_first_and_last_characters():
    assert [shortened(text, 4) for text in ("", "abcd")] == ["", "abcd"]
    assert [shortened("abcdefgh", n) for n in (2, 3, 7)] == [
        "a […6 characters…] h",
        "a […5 characters…] gh",
        "abc […1 characters…] efgh",
    ]


def test_no_prompt_is_shown_if_the_table_has_none_or_no_tracker_shows_it(tmp_path, monkeypatch):
    for values in ({"trainer.group_table": {"prompts": 0}}, {"trainer.logger": ["console", "file"]}):
        values |= {"trainer.tree_freq": 1, "trainer.default_local_dir": str(tmp_path)}
        made = trainer_of({"trainer.logger": ["wandb"], "algorithm.adv_estimator": "grpo"} | values)
        made.tokenizer = Tokenizer()
        queue = MemoryQueue(monkeypatch)
        for session in range(2):
            queue.add(f"a_{session}_0", float(session), [1], responses=[10])
        made._compute_advantage(queue.batch(), {})
        assert made.shown_groups == [] and (tmp_path / "trees/step_000001.jsonl").exists()


def test_the_configs_values_are_the_defaults():
    keys = read_keys(GroupTableKeys, composed("explore").trainer.group_table, "trainer.group_table")
    assert keys == GroupTableKeys()


# ---- the picture of a tree ----

BLUE, ORANGE, GRAY = (115, 178, 217), (235, 128, 97), (186, 191, 199)


def tree(parents: list[int | None], leaves: list[int], rewards: list[float | None], tokens: int = 5) -> dict:
    return {
        "segments": [{"parent": parent, "token_ids": [0] * tokens} for parent in parents],
        "leaves": leaves,
        "rewards": rewards,
    }


def test_ends_of_branches_are_lines_in_order_and_others_lie_between():
    # 0 has the children 1 and 2, 1 has 3 and 5; 4 follows the prompt as 0 does
    assert segment_heights([None, 0, 0, 1, None, 1]) == [1.25, 0.5, 2, 0, 3, 1]
    assert segment_heights([]) == []


@pytest.mark.parametrize("seed", range(5))
def test_mean_rewards_are_those_of_the_trajectories_through_a_segment(seed):
    rng = random.Random(seed)
    parents = [rng.choice([None, *range(i)]) for i in range(30)]
    leaves = [rng.randrange(30) for _ in range(12)]
    rewards = [rng.choice([None, rng.random()]) for _ in leaves]
    through: dict[int, list[float]] = {segment: [] for segment in range(30)}
    for leaf, reward in zip(leaves, rewards, strict=True):
        at: int | None = leaf
        while at is not None:
            through[at] += [] if reward is None else [reward]
            at = parents[at]
    expected = [pytest.approx(np.mean(own)) if own else None for own in through.values()]
    assert mean_rewards(parents, leaves, rewards) == expected


def has_color(picture: np.ndarray, color: tuple[int, int, int]) -> bool:
    plot = picture[:, :690, :3].astype(int)  # without the scale of colors at the right
    return bool((abs(plot - color).max(axis=2) <= 1).any())


@pytest.mark.parametrize(
    ("rewards", "colors"),
    [([1.0, 1.0], {BLUE}), ([0.0, 1.0], {ORANGE, BLUE}), ([None, 0.0], {ORANGE, GRAY})],
)
def test_colors_say_the_reward(rewards, colors):
    picture = tree_picture(tree([None, None], [0, 1], rewards))
    assert {color for color in (BLUE, ORANGE, GRAY) if has_color(picture, color)} == colors


def test_the_pictures_size_does_not_depend_on_the_tree():
    large = tree([None, *((i - 1) // 2 for i in range(1, 4000))], list(range(2000, 4000)), [3.0] * 2000)
    one_token = tree([None], [0], [0.5], tokens=1)
    sizes = {tree_picture(each).shape for each in (large, one_token, tree([None], [0], [0.0], 0), tree([], [], []))}
    assert sizes == {(350, 800, 4)}
