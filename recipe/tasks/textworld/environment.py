"""A game of TextWorld for `environment=gym`: an action is a command, an observation is the game's reply."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    import textworld
    from textworld.generator import KnowledgeBase
except ImportError as error:
    raise ImportError(f'{error}: task=textworld needs the extra textworld (pip install ".[textworld]")') from error

# jericho warns of each game that its list lacks, and of each command that it cuts.
warnings.filterwarnings("ignore", module="jericho")
# The rules of the games are parsed here, once for all processes of games, which are forks of one: it takes 0.2 seconds.
KnowledgeBase.deserialize(KnowledgeBase.default().serialize())
MAX_COMMAND_CHARS = 200
# Commands to the interpreter, which writes files, starts again or prints its version, and to the game's debugger.
# Games read several commands from one line, and only the first nine letters of a word.
INTERPRETER = re.compile(
    r"(?<![\w-])(save|restore|restart|quit|q|verify|version|(no|un)?script|transcrip\w*|recording|replay|tw-[\w-]+)(?![\w-])",
    re.IGNORECASE,
)
NO_COMMAND = "This is no command of the game."
_STATUS_LINE = re.compile(r"\n?>?\s*-= [^\n]* =-\S*\s*\Z")
_BREAKS = re.compile(r"\s*\n\s*")


class TextWorld:
    """A game. The rewards of a won game sum to 1: each is the increase of the score, divided by the largest score. With
    `with_commands`, `state` also has `policy_commands`, which win the game from here, and `admissible_commands`."""

    def __init__(self, with_commands: bool = False):
        self.infos = textworld.EnvInfos(
            max_score=True, policy_commands=with_commands, admissible_commands=with_commands
        )
        self.game: Any = None  # a textworld.Environment, after `reset`
        self.state: Any = None  # its textworld.GameState
        self.score, self.max_score = 0, 0

    def reset(self, task: Mapping, seed: int) -> str:
        """Begin the game of the file `task["game"]` (.z8, with its .json file beside it); return its first text."""
        path = task.get("game") if isinstance(task, Mapping) else None
        if not isinstance(path, str):
            raise ValueError(f'the task is {task!r:.200}, expected {{"game": path of a .z8 file}}')
        missing = [str(file) for file in (Path(path), Path(path).with_suffix(".json")) if not file.is_file()]
        if missing:
            raise ValueError(f"{', '.join(missing)} does not exist: make the data with recipe.tasks.textworld.data")
        self.game = textworld.start(path, self.infos)
        self.game.seed(seed)
        self.state = self.game.reset()
        self.score, self.max_score = 0, self.state.max_score
        if not self.max_score:
            raise ValueError(f"{path}: the game gives no points")
        return plain_text(self.state.feedback)

    def step(self, action: str) -> tuple[str, float, bool]:
        """Enter a command; return the game's reply, the reward, and whether the game is over."""
        line = action.partition("\n")[0][:MAX_COMMAND_CHARS]
        command = "".join(character for character in line if character.isprintable()).strip()
        if INTERPRETER.search(command):
            return NO_COMMAND, 0.0, False
        self.state, score, done = self.game.step(command)
        reward, self.score = (score - self.score) / self.max_score, score
        return plain_text(self.state.feedback), reward, done

    def copy(self) -> "TextWorld":
        other = TextWorld()
        other.infos, other.game, other.state = self.infos, self.game.copy(), self.state
        other.score, other.max_score = self.score, self.max_score
        return other

    def close(self) -> None:
        if self.game is not None:
            self.game.close()


def plain_text(feedback: str) -> str:
    """Return a game's text without the banner before it, the status line behind it, and empty lines."""
    _, _, text = feedback.rpartition("$$")  # the banner is drawn with these
    return _BREAKS.sub("\n", _STATUS_LINE.sub("", text.lstrip("\\| \t"))).strip()
