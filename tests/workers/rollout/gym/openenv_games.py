"""An OpenEnv server of a small game, as users write one; a program.

python openenv_games.py PORT MAX_SESSIONS words|moves
"""

import sys
import time

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Word(Action):
    word: str


class Heard(Observation):
    text: str


class Words(Environment):
    """Says all words so far, and how many letters they have; the reward is 1 where that is even. "fail" raises."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, goal=3, seconds=0, **kwargs):
        time.sleep(seconds)
        self.goal, self.words = goal, []
        return Heard(text=f"goal {goal}, seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        if action.word == "fail":
            raise ValueError("no such word")
        self.words.append(action.word)
        n = len("".join(self.words))
        return Heard(text=f"{' '.join(self.words)}: {n}", reward=float(n % 2 == 0), done=len(self.words) >= self.goal)

    @property
    def state(self):
        return State(step_count=len(self.words))


class Move(Action):
    dx: int
    dy: int = 0


class Position(Observation):
    x: int
    y: int


class Moves(Environment):
    """Moves a point; an action and an observation have several fields, and none is a text."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.x = self.y = 0
        return Position(x=0, y=0)

    def step(self, action, timeout_s=None, **kwargs):
        self.x, self.y = self.x + action.dx, self.y + action.dy
        return Position(x=self.x, y=self.y, reward=1.0)

    @property
    def state(self):
        return State()


GAMES = {"words": (Words, Word, Heard), "moves": (Moves, Move, Position)}

if __name__ == "__main__":
    port, max_sessions, game = sys.argv[1:]
    app = create_app(*GAMES[game], max_concurrent_envs=int(max_sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
