"""`trainer.token_budget`: a run that ends after so many generated tokens, validated at equal distances on the way."""

from collections.abc import Iterator
from contextlib import contextmanager

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe.common.reporting.run_metrics import generated_tokens
from verl.trainer.ppo.v1.component import Component
from verl.utils.parts import register_component
from verl.workers.config.keys import STRICT, read_keys


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
        yield

    def state_dict(self) -> dict:
        return {"spent": self.spent}

    def load_state_dict(self, state: dict) -> None:
        self.spent = state["spent"]
