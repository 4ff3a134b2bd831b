r"""A small world to ask about: a corpus, questions that need it, and demonstrations with tools. All made here.

    python -m recipe.arpo.search_task --output-dir outputs/data/search_task --model-dir outputs/search_task_model

Everybody has a pal and an age, which only the corpus tells (drawn anew for each seed):

    {"id": "17", "title": "bo", "text": "bo: pal ta, age 7"}

A question is "bo + ta?" (the sum of their ages) or "bo + pal?" (of bo's and bo's pal's age; two hops, for only the
corpus tells who that is). A good answer searches twice and computes:

    <think>bo</think><search>bo</search> <result>…pal ta, age 7…</result><search>ta</search> <result>…age 3…</result>
    <python>7+3</python> <result>10</result><answer>\boxed{10}</answer>

Written: corpus.jsonl for LocalSearchTool or scripts/search_server.py, train.parquet and test.parquet in verl's format
(no question is in both), demonstrations.jsonl for recipe.arpo.sft_data. Only `demo_correct` of the demonstrations are
right; the others search for the wrong one, compute something else, or guess.
"""

import asyncio
import itertools
import random
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from recipe.common.problem_files import parser_of, require
from recipe.common.tiny_model import TinyModelConfig, write_tiny_model
from verl.utils.data_files import write_rows
from verl.workers.rollout.tools.bm25_index import words
from verl.workers.rollout.tools.search_tool import LocalSearchTool

DATA_SOURCE = "search_task"
# one token each in the tiny model's tokenizer
EXTRA_WORDS = ("<search>", "</search>", "<python>", "</python>", "<result>", "</result>", "\\boxed{", "pal", ", age ")
TEST_SHARE = 0.2


@dataclass(frozen=True, kw_only=True)
class SearchTaskConfig:
    """Sizes. `demo_correct` is a share.

    Raises:
        ValueError: a field is out of range; the message names it.
    """

    people: int = 60
    train_size: int = 2000
    test_size: int = 64
    demo_size: int = 16_000
    demo_correct: float = 0.5
    seed: int = 0

    def __post_init__(self):
        require(4 <= self.people <= len(NAMES), "people", self.people, f"4 to {len(NAMES)}")
        require(0 <= self.demo_correct <= 1, "demo_correct", self.demo_correct, "between 0 and 1")
        for name in ("train_size", "test_size", "demo_size"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


NAMES = tuple(name for name in map("".join, itertools.product("bdfghklmnprstvwz", "aeiou")) if words(name) == [name])


class World(NamedTuple):
    """pal and age of everybody."""

    pals: dict[str, str]
    ages: dict[str, int]


class Question(NamedTuple):
    """`text` asks for the sum of two ages; it names `other`, or says that this is the person's pal."""

    text: str
    person: str
    other: str


def make_world(config: SearchTaskConfig) -> World:
    rng = random.Random(f"{config.seed} world")
    people = sorted(rng.sample(NAMES, config.people))
    ages = {name: rng.randint(1, 9) for name in people}
    return World({name: rng.choice([other for other in people if other != name]) for name in people}, ages)


def make_questions(world: World, config: SearchTaskConfig) -> tuple[list[Question], list[Question]]:
    """Training and test questions, half of each kind as long as there are any; drawn with repeats for training."""
    rng = random.Random(f"{config.seed} questions")
    people = sorted(world.ages)
    hops = [Question(f"{person} + pal?", person, world.pals[person]) for person in people]
    sums = [Question(f"{person} + {other}?", person, other) for person, other in itertools.permutations(people, 2)]
    rng.shuffle(hops)
    rng.shuffle(sums)
    kept = max(1, round(TEST_SHARE * len(hops)))
    half = config.test_size // 2
    test = [*itertools.islice(itertools.cycle(hops[:kept]), half), *sums[: config.test_size - half]]
    rest = hops[kept:], sums[config.test_size - half :]
    return [rng.choice(rng.choice(rest)) for _ in range(config.train_size)], test


async def make_demonstration(question: Question, world: World, tool: LocalSearchTool, right: bool, rng) -> dict:
    """A conversation in ShareGPT's layout, as recipe.arpo.sft_data reads it; results are what the tools say."""

    async def search(query: str) -> list[tuple[str, str]]:
        result = await tool.execute(query, timeout=60)
        return [("assistant", f"<search>{query}</search>"), ("user", f"<result>{result.text}</result>")]

    fault = None if right else rng.choice(["second", "compute", "guess"])
    second = rng.choice(sorted(world.ages)) if fault == "second" else question.other
    (_, call), result = await search(question.person)
    turns = [("user", question.text), ("assistant", f"<think>{question.person}</think>{call}"), result]
    answer = rng.randint(2, 18)
    if fault != "guess":
        turns += await search(second)
        numbers = [world.ages[question.person], world.ages[second]]
        if fault == "compute":
            numbers[rng.randrange(2)] = rng.randint(1, 9)
        answer = sum(numbers)
        turns += [("assistant", f"<python>{numbers[0]}+{numbers[1]}</python>"), ("user", f"<result>{answer}</result>")]
    turns.append(("assistant", f"<answer>\\boxed{{{answer}}}</answer>"))
    return {"conversations": [{"from": role, "value": text} for role, text in turns]}


def verl_row(question: Question, world: World, index: int, split: str) -> dict:
    answer = world.ages[question.person] + world.ages[question.other]
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": question.text}],
        "ability": "search",
        "reward_model": {"style": "rule", "ground_truth": str(answer)},
        "extra_info": {"split": split, "index": index, "reward_rule": "em"},
    }


async def write_search_task(output_dir: str | Path, config: SearchTaskConfig) -> Path:
    """Writes the four files, each complete or not at all; returns the folder."""
    output_dir, world = Path(output_dir), make_world(config)
    corpus = [
        {"id": str(i), "title": name, "text": f"{name}: pal {world.pals[name]}, age {world.ages[name]}"}
        for i, name in enumerate(sorted(world.ages))
    ]
    write_rows(output_dir / "corpus.jsonl", corpus)
    train, test = make_questions(world, config)
    for split, questions in (("train", train), ("test", test)):
        rows = [verl_row(question, world, i, split) for i, question in enumerate(questions)]
        write_rows(output_dir / f"{split}.parquet", rows)
    rng = random.Random(f"{config.seed} demonstrations")
    tool = LocalSearchTool(corpus=output_dir / "corpus.jsonl", max_results=1)
    demonstrations = [
        await make_demonstration(rng.choice(train), world, tool, rng.random() < config.demo_correct, rng)
        for _ in range(config.demo_size)
    ]
    await tool.close()
    write_rows(output_dir / "demonstrations.jsonl", demonstrations)
    return output_dir


def main() -> None:
    parser = parser_of(__doc__, SearchTaskConfig, output_required=False)
    parser.add_argument("--model-dir", help="where the tiny model goes that reads tags and results in few tokens")
    args = vars(parser.parse_args())
    output_dir, model_dir = args.pop("output_dir"), args.pop("model_dir")
    if not output_dir and not model_dir:
        parser.error("--output-dir or --model-dir says what to make")
    if model_dir:
        print(f"tiny model: {write_tiny_model(model_dir, TinyModelConfig(extra_words=EXTRA_WORDS))}")
    if output_dir:
        asyncio.run(write_search_task(output_dir, SearchTaskConfig(**args)))
        print(f"corpus, questions and demonstrations: {output_dir}")


if __name__ == "__main__":
    main()
