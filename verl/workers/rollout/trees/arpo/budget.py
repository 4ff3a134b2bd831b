"""Who may branch while the prompt's budget lasts: the same whoever is fast or slow.

Trajectories move on their own, so claims to branch come in any order. They are granted in the order (tool calls made,
key of the branch), a claim as soon as no earlier one could still take its place: at once while the budget is
ample, later when it is short. Nothing waits but the new branch itself.

    n = 5, beam_size = 2, call_limit = 2; trajectories (0,), (1,) and (2,) have started, two slots are left
    (1,) claims after its 1st call     (0,) and (2,) may come before or after it, but there is room for (0,)  -> granted
    (1,) claims after its 2nd call     waits: (0,) or (2,) may claim after their 1st, and one slot is left
    (0,) ends, the others go past      nothing can come before it any more                        -> granted
    their claims
"""

from heapq import heappop, heappush

Key = tuple[int, ...]


class BranchBudget:
    """Args:
    slots: trajectories that may still be started.
    beam_size: a fork makes beam_size - 1 new ones.
    call_limit: a trajectory decides after each of its tool calls, so at most so often.
    """

    def __init__(self, slots: int, beam_size: int, call_limit: int):
        self.slots, self.beam_size, self.call_limit = slots, beam_size, call_limit
        self.live: dict[Key, int] = {}  # trajectory -> tool calls at its next decision
        self.claims: list[tuple[int, Key]] = []

    def enter(self, key: Key, calls: int) -> None:
        """A trajectory runs that has made `calls` tool calls."""
        self.live[key] = calls + 1

    def decide(self, key: Key, calls: int, forks: bool) -> None:
        """A trajectory has decided after its `calls`-th call whether it wants to fork."""
        self.live[key] = calls + 1
        if forks:
            for branch in range(self.beam_size - 1):
                heappush(self.claims, (calls, (*key, calls, branch)))

    def leave(self, key: Key) -> None:
        """A trajectory has ended."""
        del self.live[key]

    def grant(self) -> list[Key]:
        """Keys of the branches that may start now; they are live from here on. Call it after every change."""
        granted = []
        while self.claims and self.slots:
            calls, key = self.claims[0]
            if self.slots <= sum(self._before(*one, calls, key) for one in self.live.items()):
                break
            heappop(self.claims)
            self.slots -= 1
            self.enter(key, calls)
            granted.append(key)
        if not self.slots:
            self.claims.clear()
        return granted

    def spare(self) -> int:
        """Slots that no branch can need any more; the caller takes them to fill up from the prompt."""
        possible = len(self.claims) + sum(self._claims(calls, self.call_limit) for calls in self.live.values())
        # a waiting claim's branch may branch on
        possible += sum(self._claims(calls + 1, self.call_limit) for calls, _ in self.claims)
        return max(0, self.slots - possible)

    def take(self, slots: int) -> None:
        self.slots -= slots

    def _before(self, other: Key, next_calls: int, calls: int, key: Key) -> int:
        """How many claims of a live trajectory and its branches may still come before a claim."""
        if (next_calls, (*other, next_calls)) >= (calls, key):
            return 0
        return self._claims(next_calls, calls)

    def _claims(self, first: int, last: int) -> int:
        """Of one trajectory and its branches, forking after every call from the first to the last."""
        return self.beam_size ** max(0, last - first + 1) - 1
