"""Games of TextWorld: maps of a few rooms with objects, and a quest. Games, demonstrations, and a tiny model.

    python -m recipe.tasks.textworld.data --output-dir outputs/data/textworld --model-dir outputs/textworld_model

Needs the extra textworld. A row of train or test names a game's file in the folder `games`; no game is in both, also
not in files of different seeds. sft.parquet has walks through the training games, as conversations: at each turn the
next command of a walkthrough, or with the chance `detours` any command that the game takes there.
"""

import itertools
import json
import multiprocessing
import os
import random
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from recipe.common.problem_files import check_common_fields, require, rl_row, run_maker, write_splits
from recipe.common.tiny_model import TinyModelConfig

INSTRUCTION = "Play this text game. Write one command a turn, such as: look, go east, open box, take key from box."
# split -> config field, in the order of writing: train.parquet is last, so if it exists, all files exist
SIZES = {"test": "test_size", "sft": "demo_size", "train": "train_size"}
MAX_COMMANDS = 8  # largest number of commands in a demonstration
ATTEMPTS = 10  # seeds that are tried for a game
THEMES = ("basic", "house")
_WORDS = "objective|is to|close|open|examine|inventory|look|insert|into|unlock|lock|with|take|from|drop|put|on|eat|go"
_WORDS += "|east|west|north|south|You|are in|the|There is|an|exit|to|here|contains|nothing|floor|ground|of|carrying|see"
_WORDS += "|can't|any such thing|That's not|verb|recognise|have|already|pick up|key|box|snack|thing|room|Room|-=|=-"
_WORDS += "|closed|locked"
# In this model's vocabulary the instruction and frequent words of the theme `basic` are one token each, also with a
# space before them.
MODEL = TinyModelConfig(
    hidden_size=128,
    intermediate_size=384,
    num_heads=4,
    num_kv_heads=4,
    extra_words=(INSTRUCTION, *(f"{space}{word}" for space in ("", " ") for word in _WORDS.split("|"))),
)


@dataclass(frozen=True, kw_only=True)
class TextWorldConfig:
    """Sizes of the games, whose quests need `min_quest` to `max_quest` commands, and of the files."""

    train_size: int = 256
    test_size: int = 32
    demo_size: int = 1024
    theme: str = "basic"  # room 5, an F-box; `house` (the kitchen, a refrigerator) has far more words
    rooms: int = 2
    objects: int = 2
    min_quest: int = 1
    max_quest: int = 2
    detours: float = 0.2  # chance of a demonstration's turn to be any command
    seed: int = 0

    def __post_init__(self):
        check_common_fields(self, SIZES.values())
        check_common_fields(self, ("rooms", "objects", "min_quest"), 1)
        require(self.min_quest <= self.max_quest, "max_quest", self.max_quest, "at least min_quest")
        require(self.theme in THEMES, "theme", self.theme, " or ".join(THEMES))
        has_games = self.train_size > 0 or self.demo_size == 0
        require(has_games, "train_size", self.train_size, "training games to demonstrate")
        require(0 <= self.detours < 1, "detours", self.detours, "from 0, below 1")


class GameSpec(NamedTuple):
    """A game to make."""

    seed: int
    quest: int  # number of its commands


def game_specs(config: TextWorldConfig, split: str, size: int) -> list[GameSpec]:
    """Return the games of a split. A seed's remainder by the number of splits is the split's place, so that no two
    splits share a game."""
    rng, place = random.Random(f"{config.seed} {split}"), list(SIZES).index(split)
    quests = range(config.min_quest, config.max_quest + 1)
    numbers = (rng.randrange(2**28) for _ in range(size))
    return [GameSpec(len(SIZES) * number + place, quests[i % len(quests)]) for i, number in enumerate(numbers)]


def make_game(spec: GameSpec, config: TextWorldConfig, folder: Path) -> Path:
    """Make a game's .z8 file, with its .json file beside it, unless it is there; return its path."""
    path = folder / f"{config.theme}_{config.rooms}_{config.objects}_{spec.quest}_{spec.seed}.z8"
    if path.is_file():
        return path
    from textworld import GameOptions, generator

    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(ATTEMPTS):
        options = GameOptions()
        options.grammar.theme = config.theme
        options.seeds = spec.seed + attempt * len(SIZES)
        options.nb_rooms, options.nb_objects, options.quest_length = config.rooms, config.objects, spec.quest
        with TemporaryDirectory(dir=folder) as unfinished:
            options.path = str(Path(unfinished, path.name))
            try:
                generator.compile_game(generator.make_game(options), options)
            except generator.QuestGenerationError:
                continue
            for made in (path.with_suffix(".json"), path):
                os.replace(Path(unfinished, made.name), made)
            return path
    raise ValueError(
        f"rooms={config.rooms}, objects={config.objects}, a quest of {spec.quest} commands: the generator finds no "
        "such game; choose more rooms and objects, or a shorter quest"
    )


def walkthrough(path: Path) -> list[str]:
    """Return commands that win a game."""
    from recipe.tasks.textworld.environment import TextWorld

    game = TextWorld(with_commands=True)
    game.reset({"game": str(path)}, 0)
    commands = list(game.state.policy_commands)
    game.close()
    return commands


def demonstration(number: int, spec: GameSpec, config: TextWorldConfig, folder: Path) -> dict:
    """Return a walk through a game as a conversation for the SFT trainer, in the messages of a rollout."""
    from recipe.tasks.textworld.environment import TextWorld

    rng, path = random.Random(f"{config.seed} demonstration {number}"), make_game(spec, config, folder)
    game, done = TextWorld(with_commands=True), False
    messages = [{"role": "user", "content": f"{INSTRUCTION}\n\n{game.reset({'game': str(path)}, 0)}"}]
    while not done and len(messages) < 2 * MAX_COMMANDS and game.state.policy_commands:
        is_detour = rng.random() < config.detours
        command = rng.choice(game.state.admissible_commands) if is_detour else game.state.policy_commands[0]
        observation, _, done = game.step(command)
        messages += [{"role": "assistant", "content": command}, {"role": "user", "content": observation}]
    game.close()
    return {"messages": messages[:-1]}


def row_of(spec: GameSpec, split: str, config: TextWorldConfig, folder: Path) -> dict:
    path = make_game(spec, config, folder)
    truth = json.dumps({"walkthrough": walkthrough(path)})
    return rl_row("textworld", INSTRUCTION, truth, split, spec.seed, "game", environment={"game": str(path)})


def write_games(output_dir: str | Path, config: TextWorldConfig) -> dict[str, Path]:
    """Write the games and the three files, see `write_splits`. An interrupted call goes on with the games there."""
    folder = Path(output_dir).resolve()
    try:
        import recipe.tasks.textworld.environment  # noqa: F401 (whether it can be imported)
    except ImportError as error:
        raise ValueError(str(error)) from error
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as processes:

        def rows_of(split: str, size: int) -> list[dict]:
            common: dict[str, Any] = {"config": config, "folder": folder / "games"}
            if split == "sft":
                specs = itertools.cycle(game_specs(config, "train", config.train_size))
                return list(processes.map(partial(demonstration, **common), range(size), specs))
            make = partial(row_of, split=split, **common)
            return list(processes.map(make, game_specs(config, split, size)))

        return write_splits(folder, config, SIZES, rows_of)


def main() -> None:
    run_maker(__doc__, TextWorldConfig, write_games, SIZES, {"model-dir": MODEL})


if __name__ == "__main__":
    main()
