"""Real games of TextWorld: what is made, what a player sees and gets, and trees of games."""

import asyncio
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset

from recipe.arpo.tree import ARPOConfig
from recipe.arpo.tree import Policy as ARPO
from recipe.common.tiny_model import END_OF_TURN, make_tokenizer
from recipe.common.tree import Policy as Plain
from recipe.tasks.textworld.data import INSTRUCTION, MODEL, SIZES, TextWorldConfig, game_specs, write_games
from recipe.tasks.textworld.reward import check_row, compute_score
from tests.packages import TEXTWORLD, installed
from verl.workers.rollout.chat.template import ChatTemplate, make_builder
from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.gym.environment import Gym, GymKeys
from verl.workers.rollout.tree_builder import grow
from verl.workers.rollout.tree_rollout import rows_of

SIZE = {"train_size": 3, "test_size": 2, "demo_size": 6, "rooms": 2, "objects": 3, "max_quest": 3}
CONFIG = TextWorldConfig(theme="house", seed=5, detours=0.3, **SIZE)
TOKENIZER = make_tokenizer(extra_words=MODEL.extra_words)
TEXT_WORLD = "recipe.tasks.textworld.environment.TextWorld"
# pytest's processes send each other their warnings, and not all of them can import jericho's
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    sys.path.append(str(installed(TEXTWORLD)))
    folder = tmp_path_factory.mktemp("textworld")
    write_games(folder, CONFIG)
    yield folder
    sys.path.remove(str(installed(TEXTWORLD)))


def rows(folder: Path, split: str) -> list[dict]:
    return pq.read_table(folder / f"{split}.parquet").to_pylist()


def begun(folder: Path, row: int = 0):
    """A game, its first text, and the commands that win it."""
    from recipe.tasks.textworld.environment import TextWorld

    game, about = TextWorld(), rows(folder, "train")[row]
    text = game.reset(about["extra_info"]["environment"], 0)
    return game, text, json.loads(about["reward_model"]["ground_truth"])["walkthrough"]


# ---- data ----


def test_a_second_call_makes_the_same_files_of_the_games_that_are_there(folder):
    games = {path: path.stat().st_mtime_ns for path in (folder / "games").iterdir()}
    before = {split: (folder / f"{split}.parquet").read_bytes() for split in SIZES}
    write_games(folder, CONFIG)
    assert {path: path.stat().st_mtime_ns for path in (folder / "games").iterdir()} == games
    assert {split: (folder / f"{split}.parquet").read_bytes() for split in SIZES} == before
    assert len(games) == 2 * (3 + 2), "a game and what is known of it"


def test_no_game_is_in_two_files_of_any_seeds():
    seeds = {
        split: {spec.seed for seed in (0, 1) for spec in game_specs(replace(CONFIG, seed=seed), split, 500)}
        for split in ("train", "test")
    }
    assert sum(map(len, seeds.values())) == len(set().union(*seeds.values())) >= 1990


@pytest.mark.parametrize(
    "wrong", [{"rooms": 0}, {"min_quest": 4}, {"detours": 1.0}, {"test_size": -1}, {"theme": "loud"}]
)
def test_wrong_options_are_named(wrong):
    with pytest.raises(ValueError, match="max_quest=" if "min_quest" in wrong else f"{next(iter(wrong))}="):
        replace(CONFIG, **wrong)


def test_without_the_package_the_extra_is_named(tmp_path):
    command = [sys.executable, "-m", "recipe.tasks.textworld.data", "--output-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(Path.cwd())})
    assert done.returncode == 1 and 'pip install ".[textworld]"' in done.stderr.splitlines()[-1]


# ---- a game ----


def test_the_walkthrough_wins_and_its_rewards_sum_to_one(folder):
    for row in range(3):
        game, text, commands = begun(folder, row)
        assert "$$" not in text and "-= " in text and "0/" not in text
        steps = [game.step(command) for command in commands]
        assert sum(reward for _, reward, _ in steps) == 1.0
        assert [done for _, _, done in steps] == [False] * (len(steps) - 1) + [True]
        game.close()


def test_the_game_answers_unknown_commands_and_the_interpreter_gets_none(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    game, text, _ = begun(folder)
    (looked, *rest), room = game.step("look"), text[text.index("-= ") :]
    assert (looked, rest) == (room, [0.0, False])
    assert game.step("xyzzy")[0] == "That's not a verb I recognise."
    for command in ("save", "Script", "look. save", "look then transcripts on", "quit", "restart\ny", "tw-reset"):
        assert game.step(command) == ("This is no command of the game.", 0.0, False)
    assert game.step("open Q-box")[0] == "You can't see any such thing."
    for command in ("", "\x00\ud83d", "look\nquit", "x" * 5000, "é" * 300):
        assert game.step(command)[1:] == (0.0, False)
    assert game.step("look")[0] == room and not list(tmp_path.iterdir())
    game.close()


def test_a_copy_is_independent(folder):
    game, _, commands = begun(folder)
    other = game.copy()
    assert [game.step(command)[1] for command in commands][-1] == 1.0
    game.close()
    assert sum(other.step(command)[1] for command in commands) == 1.0
    other.close()


def test_a_wrong_task_and_a_missing_game_are_named():
    from recipe.tasks.textworld.environment import TextWorld

    with pytest.raises(ValueError, match="the task is None, expected"):
        TextWorld().reset(None, 0)
    with pytest.raises(ValueError, match=r"/nowhere/a.z8, /nowhere/a.json does not exist"):
        TextWorld().reset({"game": "/nowhere/a.z8"}, 0)


def test_the_reward_of_a_text_is_the_walkthrough_in_its_order():
    truth = {"walkthrough": ["open box", "take key"]}
    scores = [compute_score("", text, truth)["acc"] for text in ("open box\ntake key", "take key, open box", "")]
    assert scores == [1.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="walkthrough must be a list of commands"):
        check_row("", {"walkthrough": []})


# ---- trees of games ----


class Player:
    """Writes the commands that `choose` returns for a request's prompt and seed."""

    def __init__(self, choose):
        self.choose = choose

    async def generate(self, request):
        prompt = TOKENIZER.decode(request.prompt_ids)
        tokens = TOKENIZER.encode(self.choose(prompt, request.seed) + END_OF_TURN, add_special_tokens=False)
        entropies = [random.Random(prompt).random()] * len(tokens) if request.n_entropy else None
        return Generation(tokens, [-0.5] * len(tokens), entropies=entropies)


def grown(row: dict, player: Player, policy, n: int, class_path: str = TEXT_WORLD):
    """The prompt's tokens, and the tree."""

    async def run():
        keys = GymKeys(class_path=class_path, max_steps=8)
        gym = Gym(keys, ChatTemplate(make_builder(TOKENIZER, "qwen2", {}), closes=True))
        try:
            async with gym.opened(row, 7) as opened:
                messages = await opened.first_messages(row["prompt"])
                prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                options = {"max_tokens": 1000, "stop_token_ids": [TOKENIZER.eos_token_id], "vocab_size": 2000}
                return prompt, await grow(player, prompt, n, policy, environment=opened, **options)
        finally:
            await gym.stop()

    return asyncio.run(run())


def test_trees_by_copies_and_by_replays_are_equal_segment_by_segment(folder):
    row = rows(folder, "train")[2]
    commands = [*json.loads(row["reward_model"]["ground_truth"])["walkthrough"], "look", "go east", "inventory"]
    trees = []
    for class_path in (TEXT_WORLD, "tests.recipe.tasks.textworld.replayed.ReplayedTextWorld"):
        arpo = ARPO(ARPOConfig(initial_rollouts=2, branch_probability=1.0, entropy_tokens=1), TOKENIZER.decode)
        player = Player(lambda prompt, seed: random.Random(seed).choice(commands))
        _, tree = grown(row, player, arpo, 6, class_path)
        assert tree.metrics["forks"] > 0 and tree.metrics["environment/replay_differs"] == 0
        assert tree.metrics["environment/replays"] > 0
        assert bool(tree.metrics["environment/copies"]) == (class_path == TEXT_WORLD)
        about = tree.to_dict()
        about["metrics"] = {k: v for k, v in about["metrics"].items() if not k.startswith("environment/")}
        trees.append(about)
    assert trees[0] == trees[1]


def test_demonstrations_have_the_tokens_of_a_rollout(folder):
    """A player that takes a demonstration's commands sees what the SFT trainer shows."""
    config = OmegaConf.create({"pad_mode": "no_padding", "truncation": "error", "max_length": 2000})
    dataset = MultiTurnSFTDataset(str(folder / "sft.parquet"), TOKENIZER, config)
    games = {game: path for path in (folder / "games").glob("*.z8") for game in [first_text(path)]}
    for i, row in enumerate(rows(folder, "sft")):
        first, *turns = row["messages"]
        assert first["role"] == "user" and [turn["role"] for turn in turns[::2]] == ["assistant"] * (len(turns[::2]))
        commands = [turn["content"] for turn in turns[::2]]
        task = {"environment": {"game": str(games[first["content"].partition("\n\n")[2]])}}
        asked = {"prompt": [{"role": "user", "content": INSTRUCTION}], "extra_info": task}
        player = Player(lambda prompt, seed, all=commands: (all + ["look"] * 9)[prompt.count("assistant\n") - 1])
        prompt, tree = grown(asked, player, Plain(), 1)
        (rollout,) = rows_of(tree, Plain())
        shown, mask = dataset[i]["input_ids"].tolist(), dataset[i]["loss_mask"].tolist()
        length = len(shown) - (shown[-1] != TOKENIZER.eos_token_id)  # the template ends a message with a line break
        assert shown[:length] == [*prompt, *rollout.response_ids][:length]
        learnt = [token for token, counts in zip(shown, mask, strict=True) if counts]
        assert TOKENIZER.decode(learnt).replace("\n", "").split(END_OF_TURN)[:-1] == commands


def first_text(path: Path) -> str:
    from recipe.tasks.textworld.environment import TextWorld

    game = TextWorld()
    text = game.reset({"game": str(path)}, 0)
    game.close()
    return text
