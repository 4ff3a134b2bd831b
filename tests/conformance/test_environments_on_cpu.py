"""Every environment keeps what tests/conformance/environments.py asks of environments."""

from functools import partial

import psutil
import pytest

from tests.conformance.environments import *  # noqa: F403
from tests.conformance.environments import Case
from tests.recipe.arpo.toy_agent import library
from tests.workers.rollout.chat.families import chat_of, tokenizer_of
from tests.workers.rollout.chat.test_chat_on_cpu import CALL
from tests.workers.rollout.gym.openenv_servers import openenv_server
from tests.workers.rollout.gym.test_environment_on_cpu import END_OF_TURN, TOKENIZER, encode, worker
from tests.workers.rollout.tools.python.test_python_session_on_cpu import box
from tests.workers.rollout.tools.test_sessions_on_cpu import Notes, notes
from tests.workers.rollout.toy_engine import EOS, Calls, Game
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol

ACTIONS = [[1, EOS], [2, 3, EOS], [4, EOS], [EOS]]
CELLS = [
    "x = globals().get('x', 1) * 3\nx",
    "open('log', 'a').write('a')\nopen('log').read()",
    "def f(): return x",
    "f()",
    "import random, numpy\nrandom.random(), numpy.random.randint(1000)",
    "import json; json.loads('{')",
    "kept = globals().get('kept', []); kept.append(1); sorted(globals())[-5:], kept",
    "import os; os.remove('log')",
    "import os; os._exit(7)",
]
QUERIES = [f"a<search>{query}</search>" for query in ("x", "yy", "fail")]


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


def tags(make, *turns, **options) -> Case:
    """The case of an environment whose turns end with a tag."""
    return Case(make, list(map(encode, turns)), {TOKENIZER.eos_token_id}, TOKENIZER.decode, **options)


def gym(*turns, **keys) -> Case:
    def make(max_instances):
        return worker(max_instances=max_instances, **keys)

    return tags(
        make,
        *(turns or [f"{action}{END_OF_TURN}" for action in "0123"]),
        row={"extra_info": {"environment": {"goal": 6}}},
        count_alive=processes,
    )


def python(max_instances: int) -> Tools:
    return Tools(box(), Protocol(TOKENIZER, ["python"]), InstancePool(InstanceKeys(max_instances=max_instances)))


def chat() -> Case:
    tokenizer = tokenizer_of("qwen2_5")
    turns = [
        tokenizer.encode(f"{text}<|im_end|>")
        for text in (CALL % "a", CALL % "b" + CALL % "c", "So it is.", CALL % "fail")
    ]
    return Case(lambda _: chat_of("qwen2_5"), turns, {tokenizer.eos_token_id}, tokenizer.decode)


class Games(Environment):
    """A game for each prompt."""

    def __init__(self, max_instances: int, **options):
        self.options = {"max_instances": max_instances, "delay": 0.002, **options}

    def open(self, row, seed):
        return Game(**self.options)


def letters(tokens) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


CASES = {
    "none": lambda: Case(lambda _: NO_ENVIRONMENT, [], {EOS}),
    "letters": lambda: Case(lambda _: Calls(), [[1, 18], [2, 3, 18], [4, 4, 4, 18]], {EOS}, letters),
    "tools": lambda: tags(lambda _: Tools(library(), Protocol(TOKENIZER, ["search"])), *QUERIES),
    "sessions": lambda: tags(notes, *QUERIES, count_alive=lambda: len(Notes.alive)),
    "python": lambda: tags(python, *(f"<python>{cell}</python>" for cell in CELLS), count_alive=processes),
    "chat": chat,
    "game": lambda: Case(Games, ACTIONS, {EOS}),
    "game with copies": lambda: Case(partial(Games, can_copy=True), ACTIONS, {EOS}),
    "class": lambda: gym(name="Sums"),
    "class with copies": lambda: gym(name="CopiedSums"),
    "class with tags": lambda: gym(
        *(f"{text}{END_OF_TURN}" for text in ("so 1<act>1</act>", "2<act>2</act>", "<act>0</act>")),
        name="CopiedSums",
        action_tag="act",
    ),
}


@pytest.fixture(scope="module")
def url():
    with openenv_server(max_sessions=4) as server:
        yield server.url


@pytest.fixture(params=[*CASES, "openenv"])
def case(request):
    if request.param == "openenv":
        return gym(url=request.getfixturevalue("url"))
    return CASES[request.param]()
