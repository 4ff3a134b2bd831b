"""`data.sampler.band`: each step's rewards tell the sampler of prompts how often the policy solves them."""

from dataclasses import asdict
from statistics import fmean
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le
from omegaconf import DictConfig
from pydantic.dataclasses import dataclass
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn

from verl.trainer.ppo.v1.batch_rows import BatchRows, place_of
from verl.trainer.ppo.v1.component import Component
from verl.utils.dataset.solve_rate_sampler import DATA_ROW, NumberedRows, SolveRateSampler
from verl.utils.parts import register_component
from verl.workers.config.keys import STRICT, read_keys
from verl.workers.config.schedule import EXPLORE_TRAINERS


@dataclass(frozen=True, config=STRICT)
class SamplerKeys:
    """The section `data.sampler`.

    Args:
        band: lowest and highest solve rate of the prompts to train on, such as `0.1:0.9`; None: upstream's order.
        unknown_share: share of the draws that ask first for prompts whose solve rate is unknown.
    """

    band: str | None = None
    unknown_share: Annotated[float, Ge(0), Le(1)] = 0.2

    @property
    def ends(self) -> tuple[float, float]:
        """Return the lowest and the highest rate; raise ValueError unless 0 <= lowest < highest <= 1."""
        try:
            low, high = map(float, (self.band or "").split(":"))
        except ValueError:
            low, high = 1.0, 0.0
        if not 0 <= low < high <= 1:
            raise ValueError(
                f"data.sampler.band={self.band}: expected the lowest and the highest solve rate, from 0 to 1, such as "
                "0.1:0.9"
            )
        return low, high


def solve_rates(rows: BatchRows) -> dict[int, float]:
    """Return each group's row in the data -> mean `acc` of its trajectories, or their mean reward where the reward
    function returns no `acc`; both are cut to [0, 1]."""
    acc, groups = rows.reward_field("acc"), rows.groups
    right = torch.where(acc.isnan(), rows.rewards.sum(1).double(), acc).clamp(0, 1).tolist()
    numbers = rows.column(DATA_ROW, [group.rows[0] for group in groups])
    rates = {}
    # A checkpoint of a run without the sampler may hold prompts without a number.
    for number, group in zip(numbers, groups, strict=True) if numbers else ():
        if by_session := {place_of(rows.keys[row]).session: right[row] for row in rows.answers(group)}:
            rates[int(number)] = fmean(by_session.values())
    return rates


@register_component
class SolveRates(Component):
    """Puts a `SolveRateSampler` into a run with `data.sampler.band`, and updates it once in each update of the actor,
    also by the groups that `algorithm.filter_groups` dropped. Its state is in upstream's `data.pt`."""

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.keys = read_keys(SamplerKeys, config.data.sampler, "data.sampler")
        self.sampler: SolveRateSampler | None = None
        self.dropped: dict[int, float] = {}  # rates of the dropped groups since the last update

    @classmethod
    def wanted(cls, config: DictConfig) -> bool:
        defaults = asdict(SamplerKeys())
        return defaults | dict(config.data.get("sampler") or {}) != defaults

    @classmethod
    def check(cls, config: DictConfig) -> None:
        keys = read_keys(SamplerKeys, config.data.sampler, "data.sampler")
        _, mode = keys.ends, config.trainer.v1.trainer_mode
        if mode not in EXPLORE_TRAINERS:
            raise ValueError(
                f"data.sampler.band={keys.band}: trainer.v1.trainer_mode={mode} does not update solve rates: expected "
                f"{EXPLORE_TRAINERS[0]}"
            )
        if not config.data.shuffle:
            raise ValueError(f"data.shuffle=false with data.sampler.band={keys.band}, which has an order of its own")

    def train_dataloader(self, trainer) -> StatefulDataLoader:
        data = self.config.data
        size = data.train_batch_size
        rates = initial_rates(trainer.train_dataset)
        self.sampler = SolveRateSampler(rates, self.keys.ends, self.keys.unknown_share, size, data.get("seed") or 0)
        return StatefulDataLoader(
            dataset=NumberedRows(trainer.train_dataset),
            batch_size=trainer.train_dataloader.batch_size,
            num_workers=0,  # workers would fetch ahead, and so draw by rates that are not yet known
            drop_last=True,
            collate_fn=collate_fn,
            sampler=self.sampler,
        )

    def on_drop(self, rows: BatchRows) -> None:
        # Used at the next update only: which of a step's groups are dropped first depends on their speed.
        self.dropped |= solve_rates(rows)

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        if self.sampler is None:
            return
        trained = solve_rates(rows)
        self.sampler.update(self.dropped)
        self.sampler.update(trained)
        seen, rates = np.array([*self.dropped.values(), *trained.values()]), self.sampler.rates
        known = rates[~np.isnan(rates)]
        self.dropped = {}
        metrics["sampler/in_band_share"] = float(self.sampler.in_band(rates).mean())
        metrics["sampler/unknown_share"] = 1 - len(known) / len(rates)
        if len(known):
            metrics["sampler/mean_solve_rate"] = float(known.mean())
        if len(seen):
            metrics["sampler/seen_in_band_share"] = float(self.sampler.in_band(seen).mean())


def initial_rates(dataset) -> list[float | None]:
    """Return `extra_info.solve_rate` of each row of upstream's data set; None where there is none.

    Raises:
        ValueError: a rate is no number from 0 to 1; names the row.
    """
    frame = dataset.dataframe
    infos = frame["extra_info"] if "extra_info" in frame.column_names else [None] * len(frame)
    rates = [(info or {}).get("solve_rate") for info in infos]
    for row, rate in enumerate(rates):
        if rate is not None and not (isinstance(rate, int | float) and 0 <= rate <= 1):
            raise ValueError(f"data.train_files: row {row}: extra_info.solve_rate={rate!r}: expected 0 to 1, or null")
    return rates
