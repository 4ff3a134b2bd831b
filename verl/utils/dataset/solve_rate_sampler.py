"""Draws prompts that the policy sometimes solves: a group whose answers are all right, or all wrong, teaches GRPO
nothing. `recipe/common/component.py` puts the sampler into a run with `data.sampler.band`."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from torch.utils.data import Dataset, Sampler

# column with a prompt's row number in the data set
DATA_ROW = "data_row"
# weight of a new solve rate in a row's running average
WEIGHT = 0.5


class NumberedRows(Dataset):
    """A data set whose rows also have their number, as `DATA_ROW`."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict:
        return self.dataset[number] | {DATA_ROW: number}


class SolveRateSampler(Sampler[int]):
    """Yields row numbers without end. There are three kinds of rows, and a draw takes a row of the first kind that has
    one to give: rows with a rate in the band, rows of unknown rate, rows with a rate outside of it. A share of the
    draws asks for unknown rows first, then for rows outside of the band and last for those in it: so rates that are
    old get measured again once all are known.

    Of its kind a draw takes the row whose last draw is the longest ago, at random among rows that were never drawn. A
    row is not drawn again within `gap` draws, unless the data have no other.

    >>> sampler = SolveRateSampler([0.5, 1.0, None], band=(0.1, 0.9), unknown_share=0.0, gap=2, seed=0)
    >>> [next(sampler) for _ in range(4)]
    [0, 2, 0, 2]

    Args:
        rates: solve rate of each row, from 0 to 1; None if it is unknown.
        band: lowest and highest rate in the band.
        unknown_share: probability that a draw asks for unknown rows first.
        gap: number of prompts in a training step.
        seed: seed of all draws; draw k of a run depends on it, on k, and on the rates at that time.
    """

    def __init__(
        self, rates: Sequence[float | None], band: tuple[float, float], unknown_share: float, gap: int, seed: int
    ):
        self.rates = np.array([np.nan if rate is None else rate for rate in rates], dtype=float)
        self.band, self.unknown_share, self.gap, self.seed = band, unknown_share, gap, seed
        self.draws = 0
        self.last_draw = np.full(len(rates), -gap)  # number of each row's last draw

    def __len__(self) -> int:
        return len(self.rates)

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        rng = np.random.default_rng([self.seed, self.draws])
        unknown, in_band = np.isnan(self.rates), self.in_band(self.rates)
        kinds = [in_band, unknown, ~in_band & ~unknown]
        if rng.random() < self.unknown_share:
            kinds = [*kinds[1:], in_band]
        rested = self.draws - self.last_draw >= self.gap
        rows = next((rows for kind in kinds if len(rows := np.flatnonzero(kind & rested))), np.arange(len(self)))
        oldest = rows[self.last_draw[rows] == self.last_draw[rows].min()]
        row = int(rng.choice(oldest))
        self.last_draw[row] = self.draws
        self.draws += 1
        return row

    def in_band(self, rates: np.ndarray) -> np.ndarray:
        """Return whether each rate lies in the band; an unknown one, NaN, does not."""
        return (self.band[0] <= rates) & (rates <= self.band[1])

    def update(self, rates: Mapping[int, float]) -> None:
        """Take the solve rates (row -> rate of its last group) into the rows' running averages."""
        for row, rate in rates.items():
            known = self.rates[row]
            self.rates[row] = rate if np.isnan(known) else (1 - WEIGHT) * known + WEIGHT * rate

    def state_dict(self) -> dict:
        """Return rates and draws, for torchdata's StatefulDataLoader."""
        return {"rates": self.rates.copy(), "last_draw": self.last_draw.copy(), "draws": self.draws}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a state; raise ValueError if it is of data with another number of rows."""
        if "rates" not in state:  # of a run without this sampler, from which this one goes on
            return
        if (saved := len(state["rates"])) != len(self):
            raise ValueError(
                f"data.train_files has {len(self)} rows, and the checkpoint's solve rates are of {saved}: resume with "
                " the same data, or without data.sampler.band"
            )
        self.rates, self.last_draw, self.draws = state["rates"].copy(), state["last_draw"].copy(), state["draws"]
