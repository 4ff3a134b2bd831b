"""Problems of reasoning-gym's families: arithmetic, algorithms, logic, games and more, each with a verifier.

    python -m recipe.tasks.reasoning_gym.data --output-dir outputs/data/reasoning_gym \\
        --families chain_sum,knights_knaves --family-config 'chain_sum: {min_terms: 3, max_digits: 2}'

writes train.parquet and test.parquet in verl's format, and sft.parquet with demonstrations for a warm start. The
families take turns. Each split has its own seed, and no question of the test is in another file. A ground truth is JSON
text with what a verifier needs: `family`, `config`, `answer` and `metadata`.

Demonstrations are the answer alone; a wrong one is the answer of another problem.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import yaml

from recipe.common.problem_files import (
    check_common_fields,
    conversation,
    draw_until,
    require,
    rl_row,
    run_maker,
    write_splits,
)
from recipe.common.tiny_model import model_of_1_3_million
from recipe.tasks.reasoning_gym.families import check_families, make_dataset

SIZES = {"test": "test_size", "sft": "demo_size", "train": "train_size"}  # train.parquet is last: then all files exist
FRUITLESS_ATTEMPTS = 1000
ENTRIES_AT_ONCE = 200
INSTRUCTION = "Think first, then give the answer alone between tags, as in <answer>your answer</answer>."
# the words of spell_backward's questions are one token
MODEL = model_of_1_3_million(["Spell this word backward (example: sun -> nus): "])


@dataclass(frozen=True, kw_only=True)
class ReasoningGymConfig:
    """Families, difficulty and sizes. A model of a million parameters learns the defaults in minutes.

    Attributes:
        families: names of families, separated by commas.
        family_config: YAML with the settings of families that differ from the library's, by the library's names.
        demo_correct: share of the demonstrations that are right.
        style: style of the prompt: the question alone (`short`), or with instructions (`long`).
    """

    families: str = "spell_backward"
    family_config: str = "spell_backward: {min_word_len: 3, max_word_len: 5}"
    train_size: int = 4_000
    test_size: int = 500
    demo_size: int = 40_000
    demo_correct: float = 0.4
    style: str = "short"
    seed: int = 0

    def __post_init__(self):
        check_common_fields(self, SIZES.values())
        for family in self.names:
            make_dataset(family, self.settings.get(family, {}))

    @property
    def names(self) -> list[str]:
        return check_families(self.families.split(","))

    @property
    def settings(self) -> dict[str, dict]:
        """Return family -> its settings."""
        settings = yaml.safe_load(self.family_config) or {}
        is_valid = isinstance(settings, dict) and all(isinstance(value, dict) for value in settings.values())
        require(is_valid, "family_config", self.family_config, "YAML such as 'chain_sum: {min_terms: 2}'")
        check_families(list(settings))
        return settings

    def entries(self, family: str, split: str) -> Iterator[dict]:
        """Yield the library's entries of a family without end, from small data sets with seeds of the split: some make
        all entries at once."""
        settings = self.settings.get(family, {})
        for number in count():
            seed = random.Random(f"{self.seed} {split} {family} {number}").getrandbits(32)
            yield from make_dataset(family, settings, seed=seed, size=ENTRIES_AT_ONCE)


@dataclass(frozen=True)
class Problem:
    """A problem of a family; two with the same question are equal."""

    question: str
    family: str = field(compare=False)
    answer: str | None = field(compare=False)
    truth: str = field(compare=False)


def draw_problems(config: ReasoningGymConfig, split: str, size: int, excluded: set[Problem]) -> list[Problem]:
    """Return `size` problems of a split, distinct and none of `excluded`; the families take turns."""
    names, settings = config.names, config.settings
    entries = {family: config.entries(family, split) for family in names}
    is_demo = split == "sft"

    def draw(drawn: int) -> Problem | None:
        family = names[drawn % len(names)]
        entry = next(entries[family])
        if is_demo and entry["answer"] is None:
            raise ValueError(f"demo_size={config.demo_size}: {family} has no answers to show; set it to 0")
        truth = {"family": family, "config": settings.get(family, {})}
        truth |= {"answer": entry["answer"], "metadata": entry["metadata"]}
        question = entry["question"] + (f"\n\n{INSTRUCTION}" if config.style == "long" else "")
        return Problem(question, family, entry["answer"], json.dumps(truth))

    return draw_until(draw, lambda p: p not in excluded, size, SIZES[split], FRUITLESS_ATTEMPTS, is_demo)


def write_reasoning_gym(output_dir: str | Path, config: ReasoningGymConfig) -> dict[str, Path]:
    """Write the three files, except for sizes of 0, and return their paths by split. No file is ever incomplete."""
    test: set[Problem] = set()

    def rows_of(split: str, size: int) -> list[dict]:
        problems = draw_problems(config, split, size, test)
        if split == "sft":
            rng, turns = random.Random(f"{config.seed} demonstrations"), len(config.names)
            rows, by_family = [], [problems[turn::turns] for turn in range(turns)]
            for i, problem in enumerate(problems):  # a wrong answer is that of another problem of the family
                shown = problem if rng.random() < config.demo_correct else by_family[i % turns][i // turns - 1]
                rows.append(conversation(problem.question, f"<answer>{shown.answer}</answer>"))
            return rows
        if split == "test":
            test.update(problems)
        return [
            rl_row("reasoning_gym", p.question, p.truth, split, i, "reasoning", family=p.family)
            for i, p in enumerate(problems)
        ]

    return write_splits(output_dir, config, SIZES, rows_of)


def main(arguments: list[str] | None = None) -> None:
    run_maker(__doc__, ReasoningGymConfig, write_reasoning_gym, SIZES, {"model-dir": MODEL}, arguments)


if __name__ == "__main__":
    main()
