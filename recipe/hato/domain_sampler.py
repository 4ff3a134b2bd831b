"""Orders a data set so that the training steps of an episode of meta-learning see rows of a single domain."""

import random
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from torch.utils.data import Sampler


class DomainSampler(Sampler[int]):
    """Yields row numbers in blocks, each of a single domain; blocks and rows are shuffled anew in every epoch.

    Each domain fills as many whole blocks as it can; its remaining rows are left out of the epoch. A domain with fewer
    rows than a block fills a block by repeating its rows.

    >>> sampler = DomainSampler(["a", "b", "a", "b", "a"], block=2, seed=0)
    >>> len(sampler), len(list(sampler))
    (4, 4)

    Args:
        domains: the domain of each row.
        block: number of rows in a block: the prompts of a training step times the steps of an episode.
        seed: seed of the shuffling.
    """

    def __init__(self, domains: Sequence[Hashable], block: int, seed: int):
        if not domains or block < 1:
            raise ValueError(f"{len(domains)} rows, block={block}: expected at least 1 of each")
        self.rows_of: dict[Hashable, list[int]] = defaultdict(list)
        for row, domain in enumerate(domains):
            self.rows_of[domain].append(row)
        self.block, self.seed = block, seed
        self.epoch, self.yielded = -1, 0
        self.resumes_at: int | None = None

    def __len__(self) -> int:
        return sum(max(1, len(rows) // self.block) for rows in self.rows_of.values()) * self.block

    def __iter__(self) -> Iterator[int]:
        if self.resumes_at is None:
            self.epoch, self.yielded = self.epoch + 1, 0
        else:
            self.yielded, self.resumes_at = self.resumes_at, None
        for row in self._order()[self.yielded :]:
            self.yielded += 1
            yield row

    def _order(self) -> list[int]:
        rng, blocks = random.Random(f"{self.seed} {self.epoch}"), []
        for rows in self.rows_of.values():
            rows = rng.sample(rows, len(rows))
            rows = rows * -(-self.block // len(rows)) if len(rows) < self.block else rows
            blocks += [rows[at : at + self.block] for at in range(0, len(rows) - self.block + 1, self.block)]
        rng.shuffle(blocks)
        return [row for block in blocks for row in block]

    def state_dict(self) -> dict[str, int]:
        """Return the position in the epoch, for torchdata's StatefulDataLoader."""
        return {"epoch": self.epoch, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.resumes_at = state["epoch"], state["yielded"]
