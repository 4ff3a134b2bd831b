r"""Makes a synthetic search task: a corpus, questions that need it, and demonstrations with tools.

    python -m recipe.tasks.search.data --output-dir outputs/data/search_task --model-dir outputs/search_task_model

The corpus holds each person's age and pal, drawn anew for each seed. "bo + ta?" asks for the sum of their ages, "bo +
pal pal?" for bo's age plus that of the pal of bo's pal, after `min_hops` to `max_hops` searches for different people:

    <think>bo</think><search>bo</search> <result>bo: pal ta, age 7</result><search>ta</search> <result>…age 3</result>
    <python>7+3</python> <result>10</result><answer>\boxed{10}</answer>

A demonstration (for recipe.arpo.sft_data) that is not right searches for a wrong person, miscomputes, or guesses.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipe.common.problem_files import check_common_fields, require, rl_row, run_maker
from recipe.common.tiny_model import TinyModelConfig
from verl.utils.data_files import write_rows
from verl.workers.rollout.tools.search.bm25_index import words
from verl.workers.rollout.tools.search.tool import LocalSearchTool

DATA_SOURCE = "search_task"
# words that are one token each in the tiny model's tokenizer
EXTRA_WORDS = ("<search>", "</search>", "<python>", "</python>", "<result>", "</result>", "\\boxed{", "pal", ", age ")
# one token each for a model with environment=chat: what calls and tool messages have in common
CHAT_WORDS: tuple[str, ...] = ('\n<tool_call>\n{"name": "', '", "arguments": {"', '"}}\n</tool_call>', 'query": "')
CHAT_WORDS += ('code": "', "python", "search", "<tool_response>\n", "\n</tool_response>")
TEST_SHARE = 0.2
# file -> config field with its number of rows, in the order of writing
SIZES = {"corpus": "people", "demonstrations": "demo_size", "test": "test_size", "train": "train_size"}


@dataclass(frozen=True, kw_only=True)
class SearchTaskConfig:
    """Sizes of the search task. A question needs `min_hops` to `max_hops` searches; `demo_correct` is a share."""

    people: int = 60
    train_size: int = 2000
    test_size: int = 64
    demo_size: int = 16_000
    demo_correct: float = 0.5
    min_hops: int = 2
    max_hops: int = 2
    seed: int = 0

    def __post_init__(self):
        require(4 <= self.people <= len(NAMES), "people", self.people, f"4 to {len(NAMES)}")
        require(2 <= self.min_hops, "min_hops", self.min_hops, "at least 2")
        require(self.min_hops <= self.max_hops < self.people, "max_hops", self.max_hops, "min_hops to people - 1")
        check_common_fields(self, ("train_size", "test_size", "demo_size"), 1)


NAMES = tuple(name for name in map("".join, itertools.product("bdfghklmnprstvwz", "aeiou")) if words(name) == [name])


class World(NamedTuple):
    """The pal and the age of every person, by name."""

    pals: dict[str, str]
    ages: dict[str, int]


class Question(NamedTuple):
    """A question `text` for the sum of the first and the last age of `people`, who must be searched in this order."""

    text: str
    people: tuple[str, ...]


def make_world(config: SearchTaskConfig) -> World:
    rng = random.Random(f"{config.seed} world")
    people = sorted(rng.sample(NAMES, config.people))
    ages = {name: rng.randint(1, 9) for name in people}
    return World({name: rng.choice([other for other in people if other != name]) for name in people}, ages)


def chain_of(person: str, length: int, world: World) -> tuple[str, ...]:
    """Return `length` names: a person, the person's pal, the pal's pal, and so on."""
    chain = [person]
    while len(chain) < length:
        chain.append(world.pals[chain[-1]])
    return tuple(chain)


def make_questions(world: World, config: SearchTaskConfig) -> tuple[list[Question], list[Question]]:
    """Return training questions (drawn with repeats) and other test questions, half of them naming one person, half
    two. Test questions that name one person repeat if there are too few of them."""
    people = sorted(world.ages)
    one_named, two_named = [], []
    for hops in range(config.min_hops, config.max_hops + 1):
        pals = ["pal"] * (hops - 1)
        for person in people:
            one_named.append(Question(f"{person} + {' '.join(pals)}?", chain_of(person, hops, world)))
        for person, other in itertools.permutations(people, 2):
            text = f"{person} + {' '.join([other, *pals[1:]])}?"
            two_named.append(Question(text, (person, *chain_of(other, hops - 1, world))))
    one_named, two_named = (
        [question for question in questions if len(set(question.people)) == len(question.people)]
        for questions in (one_named, two_named)
    )
    enough = any(len(question.people) == config.max_hops for question in one_named)
    require(enough, "max_hops", config.max_hops, "fewer, or another seed: nobody's pals make so long a chain")
    rng = random.Random(f"{config.seed} questions")
    rng.shuffle(one_named)
    rng.shuffle(two_named)
    kept = max(1, round(TEST_SHARE * len(one_named)))
    half = config.test_size // 2
    test = [*itertools.islice(itertools.cycle(one_named[:kept]), half), *two_named[: config.test_size - half]]
    rest = one_named[kept:], two_named[config.test_size - half :]
    require(all(rest), "people", config.people, f"more, so that questions remain beside test_size={config.test_size}")
    return [rng.choice(rng.choice(rest)) for _ in range(config.train_size)], test


async def make_demonstration(question: Question, world: World, tool: LocalSearchTool, right: bool, rng) -> dict:
    """Return a conversation in ShareGPT's layout for recipe.arpo.sft_data; its results are the tools' outputs."""

    async def search(query: str) -> list[tuple[str, str]]:
        text = await tool.execute(query, timeout=60)
        return [("assistant", f"<search>{query}</search>"), ("user", f"<result>{text}</result>")]

    fault = None if right else rng.choice(["person", "compute", "guess"])
    people = question.people
    if fault == "person":
        i, wrong = rng.choice([(i, name) for i in range(1, len(people)) for name in sorted(world.ages)])
        people = (*people[:i], *chain_of(wrong, len(people) - i, world))
    (_, call), result = await search(people[0])
    turns = [("user", question.text), ("assistant", f"<think>{people[0]}</think>{call}"), result]
    answer = rng.randint(2, 18)
    if fault != "guess":
        for person in people[1:]:
            turns += await search(person)
        numbers = [world.ages[people[0]], world.ages[people[-1]]]
        if fault == "compute":
            numbers[rng.randrange(2)] = rng.randint(1, 9)
        answer = sum(numbers)
        turns += [("assistant", f"<python>{numbers[0]}+{numbers[1]}</python>"), ("user", f"<result>{answer}</result>")]
    turns.append(("assistant", f"<answer>\\boxed{{{answer}}}</answer>"))
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


async def write_search_task(output_dir: str | Path, config: SearchTaskConfig) -> dict[str, Path]:
    """Write the four files and return their paths by the keys of SIZES."""
    world, suffixes = make_world(config), ("jsonl", "jsonl", "parquet", "parquet")
    paths = {name: Path(output_dir, f"{name}.{suffix}") for name, suffix in zip(SIZES, suffixes, strict=True)}
    corpus = [
        {"id": str(i), "title": name, "text": f"{name}: pal {world.pals[name]}, age {world.ages[name]}"}
        for i, name in enumerate(sorted(world.ages))
    ]
    write_rows(paths["corpus"], corpus)
    train, test = make_questions(world, config)
    rng = random.Random(f"{config.seed} demonstrations")
    tool = LocalSearchTool(corpus=paths["corpus"], max_results=1)
    demonstrations = [
        await make_demonstration(rng.choice(train), world, tool, rng.random() < config.demo_correct, rng)
        for _ in range(config.demo_size)
    ]
    await tool.close()
    write_rows(paths["demonstrations"], demonstrations)
    for split, questions in (("test", test), ("train", train)):  # train.parquet is written last.
        rows = []
        for i, (text, people) in enumerate(questions):
            answer = str(world.ages[people[0]] + world.ages[people[-1]])
            rows.append(rl_row(DATA_SOURCE, text, answer, split, i, ability="search", reward_rule="em"))
        write_rows(paths[split], rows)
    return paths


def main() -> None:
    models = {
        "model-dir": TinyModelConfig(extra_words=EXTRA_WORDS),
        "chat-model-dir": TinyModelConfig(extra_words=EXTRA_WORDS + CHAT_WORDS),
    }
    run_maker(__doc__, SearchTaskConfig, lambda *args: asyncio.run(write_search_task(*args)), SIZES, models)


if __name__ == "__main__":
    main()
