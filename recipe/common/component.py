"""Components that any run may have.

SolveRates    data.sampler.band: each step's rewards tell the sampler of prompts how often the policy solves them
TokenBudget   trainer.token_budget: a run ends after so many generated tokens, validated at equal distances on the way
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import fmean

import numpy as np
import pandas as pd
import torch
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.utils.dataset.rl_dataset import collate_fn

from recipe.common.reporting.run_metrics import generated_tokens
from verl.trainer.ppo.v1.batch_rows import BatchRows, place_of
from verl.trainer.ppo.v1.component import Component
from verl.utils.dataset.solve_rate_sampler import SolveRateSampler
from verl.utils.parts import register_component
from verl.workers.config.keys import STRICT, read_keys
from verl.workers.config.schedule import EXPLORE_TRAINERS

# column with a prompt's row number in the data set
DATA_ROW = "data_row"


@dataclass(frozen=True, config=STRICT)
class SamplerKeys:
    """The section `data.sampler`, see docs/explore.md."""

    band: str | None = None
    unknown_share: float = Field(default=0.2, ge=0, le=1)

    @property
    def ends(self) -> tuple[float, float]:
        """The lowest and the highest solve rate; ValueError unless 0 <= lowest < highest <= 1."""
        try:
            low, high = map(float, str(self.band).split(":"))
        except ValueError:
            low, high = 1.0, 0.0
        if not 0 <= low < high <= 1:
            raise ValueError(f"data.sampler.band={self.band}: expected two solve rates from 0 to 1, such as 0.1:0.9")
        return low, high


def solve_rates(rows: BatchRows) -> dict[int, float]:
    """Return each group's row in the data -> mean over its trajectories of `acc`, or of the reward if there is no
    `acc`, both cut to [0, 1]. Prompts from a checkpoint of a run without the sampler have no row, and are left out."""
    acc, groups = rows.reward_field("acc"), rows.groups
    right = torch.where(acc.isnan(), rows.rewards.sum(1).double(), acc).clamp(0, 1).tolist()
    numbers, rates = rows.column(DATA_ROW, [group.rows[0] for group in groups]) or [], {}
    for number, group in zip(numbers, groups, strict=False):
        if by_session := {place_of(rows.keys[row]).session: right[row] for row in rows.answers(group)}:
            rates[int(number)] = fmean(by_session.values())
    return rates


@register_component
class SolveRates(Component):
    """Puts a `SolveRateSampler` into the run, whose state is in upstream's `data.pt`, and updates it with the actor."""

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.keys = read_keys(SamplerKeys, config.data.sampler, "data.sampler")
        self.dropped: dict[int, float] = {}  # rates of the groups that were dropped since the last update

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        defaults = asdict(SamplerKeys())
        return defaults | dict(config.data.get("sampler") or {}) != defaults

    @classmethod
    def check(cls, config: DictConfig) -> None:
        keys, mode = read_keys(SamplerKeys, config.data.sampler, "data.sampler"), config.trainer.v1.trainer_mode
        if keys.ends and mode not in EXPLORE_TRAINERS:
            raise ValueError(
                f"data.sampler.band={keys.band}: trainer.v1.trainer_mode={mode} does not update solve rates: expected "
                f"{EXPLORE_TRAINERS[0]}"
            )

    def train_dataloader(self, trainer) -> StatefulDataLoader:
        """Raise ValueError if a row's `extra_info.solve_rate` is no number from 0 to 1."""
        dataset, data = trainer.train_dataset, self.config.data
        frame = dataset.dataframe
        infos = frame["extra_info"] if "extra_info" in frame.column_names else [{}] * len(frame)
        rates = [(info or {}).get("solve_rate") for info in infos]
        for row, rate in enumerate(rates):
            if rate is not None and not (isinstance(rate, int | float) and 0 <= rate <= 1):
                raise ValueError(f"data.train_files, row {row}: extra_info.solve_rate={rate!r}: expected 0 to 1")
        dataset.dataframe = frame.add_column(DATA_ROW, np.arange(len(frame)))
        self.sampler = SolveRateSampler(
            rates, self.keys.ends, self.keys.unknown_share, data.train_batch_size, data.get("seed") or 0
        )
        return StatefulDataLoader(
            dataset=dataset,
            batch_size=trainer.train_dataloader.batch_size,
            num_workers=0,  # workers would fetch ahead, and so draw by rates that are not yet known
            drop_last=True,
            collate_fn=collate_fn,
            sampler=self.sampler,
        )

    def on_drop(self, rows: BatchRows) -> None:
        # The sampler gets them at the update: which groups are dropped first depends on how fast they are.
        self.dropped |= solve_rates(rows)

    def after_advantage(self, rows: BatchRows, metrics: dict) -> None:
        trained = solve_rates(rows)
        for seen in (self.dropped, trained):
            self.sampler.update(seen)
        groups, rates = np.array([*self.dropped.values(), *trained.values()]), self.sampler.rates
        self.dropped = {}
        metrics["sampler/in_band_share"] = float(self.sampler.in_band(rates).mean())
        metrics["sampler/unknown_share"] = float(np.isnan(rates).mean())
        if len(groups):
            metrics["sampler/mean_solve_rate"] = float(np.nanmean(rates))
            metrics["sampler/seen_in_band_share"] = float(self.sampler.in_band(groups).mean())


@dataclass(frozen=True, config=STRICT)
class TokenBudgetConfig:
    """The number of tokens to generate for training, dropped prompts included, and of validations after the first."""

    tokens: int | None = Field(default=None, ge=1)
    validations: int = Field(default=8, ge=1)


@register_component
class TokenBudget(Component):
    """Ends the run with the step that spends the budget; upstream's trainer validates by a `test_freq` set here."""

    state_file = "token_budget.json"

    def __init__(self, config: DictConfig):
        super().__init__(config)
        self.keys = read_keys(TokenBudgetConfig, config.trainer.token_budget, "trainer.token_budget")
        self.spent = 0.0

    @classmethod
    def is_needed(cls, config: DictConfig) -> bool:
        return OmegaConf.select(config, "trainer.token_budget.tokens") is not None

    @classmethod
    def check(cls, config: DictConfig) -> None:
        cls(config)

    @contextmanager
    def around_update(self, trainer, metrics: dict) -> Iterator[None]:
        step, distance = trainer.global_steps, self.keys.tokens / self.keys.validations
        passed = self.spent // distance
        counts = {key: [value] for key, value in metrics.items() if key.startswith(("tree/", "training/", "hato/"))}
        self.spent += float(generated_tokens(pd.DataFrame(counts)).iloc[0])
        trainer.config.trainer.test_freq = step if self.spent // distance > passed else trainer.total_training_steps + 1
        if self.spent >= self.keys.tokens:
            trainer.total_training_steps = step
            if trainer.config.trainer.save_freq > 0:  # upstream has asked before the step whether it is the last one
                trainer.config.trainer.save_freq = step
        yield

    def state_dict(self) -> dict:
        return {"spent": self.spent}

    def load_state_dict(self, state: dict) -> None:
        self.spent = state["spent"]

    def on_resume(self, trainer) -> None:
        if self.spent >= self.keys.tokens:
            trainer.total_training_steps = trainer.global_steps
