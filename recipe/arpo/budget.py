"""The budget that grants branches to the trajectories of a prompt, independent of their speed.

Trajectories run at their own speed, so claims to branch arrive in any order. They are granted in the order (tool calls
made, key of the branch), each as soon as no earlier claim could still take its slot: at once while many slots are left,
later when few are. Only the new branch itself waits.

    n = 5, beam_size = 2, call_limit = 2; trajectories (0,), (1,) and (2,) have started, two slots are left
    (1,) claims after its 1st call     only (0,) may still claim before it, and two slots are left  -> granted
    (1,) claims after its 2nd call     waits: (0,) or (2,) may claim after their 1st, and one slot is left
    (0,) ends, the others do not fork  no claim can come before it any more                         -> granted
"""

from heapq import heappop, heappush

Key = tuple[int, ...]  # identifier of a trajectory (tree.py)


class BranchBudget:
    """The number of trajectories that a prompt may still start (`slots`), and the claims to them.

    A trajectory decides about a fork into `beam_size` branches, itself included, after each of its at most `call_limit`
    tool calls.
    """

    def __init__(self, slots: int, beam_size: int, call_limit: int):
        self.slots, self.beam_size, self.call_limit = slots, beam_size, call_limit
        self.live: dict[Key, int] = {}  # running trajectory -> number of tool calls at its next decision
        self.claims: list[tuple[int, Key]] = []

    def enter(self, key: Key, calls: int) -> None:
        """Record the start of a trajectory that has made `calls` tool calls."""
        self.live[key] = calls + 1

    def decide(self, key: Key, calls: int, forks: bool) -> None:
        """Record a trajectory's decision, after its `calls`-th call, whether to fork."""
        self.live[key] = calls + 1
        if forks:
            for branch in range(self.beam_size - 1):
                heappush(self.claims, (calls, (*key, calls, branch)))

    def leave(self, key: Key) -> None:
        """Record the end of a trajectory."""
        del self.live[key]

    def grant(self) -> list[Key]:
        """Return the keys of the branches that may start now, and record their start. Call it after every change."""
        granted = []
        while self.claims and self.slots:
            calls, key = self.claims[0]
            earlier = sum(
                self._claims(next_calls, calls)
                for other, next_calls in self.live.items()
                if (next_calls, (*other, next_calls)) < (calls, key)
            )
            if self.slots <= earlier:
                break
            heappop(self.claims)
            self.slots -= 1
            self.enter(key, calls)
            granted.append(key)
        if not self.slots:
            self.claims.clear()
        return granted

    def take_spare(self) -> int:
        """Return the number of slots that no branch can use any more, for trajectories from the prompt, and take them
        from the budget."""
        possible = len(self.claims) + sum(self._claims(calls, self.call_limit) for calls in self.live.values())
        # The branch of a waiting claim may fork as well.
        possible += sum(self._claims(calls + 1, self.call_limit) for calls, _ in self.claims)
        spare = max(0, self.slots - possible)
        self.slots -= spare
        return spare

    def _claims(self, first: int, last: int) -> int:
        """Return the number of claims of a trajectory and its branches that all fork after calls `first` to `last`."""
        return self.beam_size ** max(0, last - first + 1) - 1
