"""The prompts of a synchronous run that drops groups: a step begins after the last prompt that the step before used.

How many prompts a step asks for depends on which groups end first. Those that it did not use are asked again, so that
the prompts of the next step depend on the data alone, also after a run has resumed.
"""

from collections.abc import Callable, Collection

from tensordict import TensorDict

# number of steps whose largest share of useful groups is expected: more prompts can be asked later, but not fewer
REMEMBERED_STEPS = 3


class PromptSupply:
    """The prompts that this step has asked for, and those kept for it.

    Args:
        fetch: function that returns the next prompt of the data, in upstream's form with a `uid`.
    """

    def __init__(self, fetch: Callable[[], TensorDict]):
        self.fetch = fetch
        self.asked: dict[str, TensorDict] = {}  # this step's prompts by uid, in the order of the data
        self.kept: list[TensorDict] = []
        self.shares: list[float] = []  # share of useful groups in each of the last steps

    def next(self) -> TensorDict:
        """Return the next prompt: a kept one, or else a new one."""
        prompt = self.kept.pop(0) if self.kept else self.fetch()
        self.asked[list(prompt["uid"])[0]] = prompt.copy()  # the submission adds columns to the original
        return prompt

    def useful_share(self, useful: int, judged: int, batch_size: int) -> float:
        """Return the expected share of useful groups, in which the last steps count as half a batch.

        Args:
            useful: number of useful groups among this step's.
            judged: number of this step's groups that have ended without a failure.
        """
        expected = max(self.shares, default=1.0)
        return (useful + expected * batch_size / 2) / (judged + batch_size / 2)

    def end_step(self, unused: Collection[str], share: float) -> None:
        """Keep the prompts that were not used, and remember the share of useful groups, above 0."""
        self.kept = [prompt for uid, prompt in self.asked.items() if uid in unused] + self.kept
        self.asked, self.shares = {}, [*self.shares, share][-REMEMBERED_STEPS:]
