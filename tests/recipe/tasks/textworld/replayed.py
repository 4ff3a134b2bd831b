"""A game that cannot copy itself, so that every other branch of a tree replays its commands."""

from recipe.tasks.textworld.environment import TextWorld


class ReplayedTextWorld:
    def __init__(self):
        self.game = TextWorld()
        self.reset, self.step, self.close = self.game.reset, self.game.step, self.game.close

    def reset(self, task, seed): ...

    def step(self, action): ...
