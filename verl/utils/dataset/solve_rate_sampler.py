"""Draws prompts that the policy sometimes solves: groups that are all right, or all wrong, teach GRPO nothing.
`recipe/common/component.py` puts the sampler into a run with `data.sampler.band`."""

from collections.abc import Mapping, Sequence

import numpy as np
from torch.utils.data import Sampler


class SolveRateSampler(Sampler[int]):
    """Yields row numbers without end: rows with a solve rate in the band; if none has rested for `gap` draws (the
    prompts of a step), rows of unknown rate (None); if none of these has, rows outside the band. Of its kind a draw
    takes the row whose last draw is the longest ago, at random among rows that were never drawn.

    `unknown_share` of the draws try rows of the band last, and so measure old rates again once all rates are known. A
    draw depends on the seed, its number and the rates at that time.

    >>> sampler = SolveRateSampler([0.5, 1.0, None], band=(0.1, 0.9), unknown_share=0.0, gap=2, seed=0)
    >>> [next(sampler) for _ in range(4)]
    [0, 2, 0, 2]
    """

    def __init__(
        self, rates: Sequence[float | None], band: tuple[float, float], unknown_share: float, gap: int, seed: int
    ):
        self.rates = np.array(rates, dtype=float)  # None becomes NaN
        self.band, self.unknown_share, self.gap, self.seed = band, unknown_share, gap, seed
        self.draws = 0
        self.last_draw = np.full(len(rates), -gap)  # number of each row's last draw

    def __iter__(self):
        return self

    def __next__(self) -> int:
        rng = np.random.default_rng([self.seed, self.draws])
        unknown, in_band = np.isnan(self.rates), self.in_band(self.rates)
        kinds = [in_band, unknown, ~in_band & ~unknown]
        if rng.random() < self.unknown_share:
            kinds = [*kinds[1:], in_band]
        rested = self.draws - self.last_draw >= self.gap
        rows = next((rows for kind in kinds if len(rows := np.flatnonzero(kind & rested))), np.arange(len(self.rates)))
        row = int(rng.choice(rows[self.last_draw[rows] == self.last_draw[rows].min()]))
        self.last_draw[row] = self.draws
        self.draws += 1
        return row

    def in_band(self, rates: np.ndarray) -> np.ndarray:
        """Return whether each rate lies in the band; an unknown one, NaN, does not."""
        return (self.band[0] <= rates) & (rates <= self.band[1])

    def update(self, rates: Mapping[int, float]) -> None:
        """Set the rate of each row to the mean of its rate so far, if there is one, and that of its last group."""
        for row, rate in rates.items():
            self.rates[row] = np.nanmean([self.rates[row], rate])

    def state_dict(self) -> dict:
        """Return rates and draws, for torchdata's StatefulDataLoader."""
        return {"rates": self.rates.copy(), "last_draw": self.last_draw.copy(), "draws": self.draws}

    def load_state_dict(self, state: dict) -> None:
        """Go on from a state; one of upstream's samplers changes nothing. Raise ValueError if the data have changed."""
        if (saved := len(state.get("rates", self.rates))) != len(self.rates):
            raise ValueError(
                f"data.train_files has {len(self.rates)} rows, and the checkpoint's solve rates are of {saved}: resume "
                "with the same data, or without data.sampler.band"
            )
        for name in state.keys() & {"rates", "last_draw", "draws"}:
            setattr(self, name, state[name])
