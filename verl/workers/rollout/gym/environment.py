"""The environment of `environment=gym`: anything with `reset` and `step`. An action is a turn of the model, or what
stands in a tag of it; an observation is a message of the user.

    prompt + first observation | turn <|im_end|> | a user message | turn <|im_end|> | …

The row's `extra_info.environment` is the task, the first argument of `reset`.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from verl.workers.config.keys import STRICT
from verl.workers.rollout.chat.calls import without_thoughts
from verl.workers.rollout.chat.template import ChatTemplate
from verl.workers.rollout.environment import Answer, Ends
from verl.workers.rollout.gym.openenv import OpenEnvServer
from verl.workers.rollout.gym.process import Hosts
from verl.workers.rollout.stateful import Instance, InstanceKeys, InstancePool, State, StatefulEnvironment


@dataclass(frozen=True, config=STRICT)
class GymKeys(InstanceKeys):
    """Keys under `environment` with environment=gym (recipe/common/config/environment/gym.yaml)."""

    class_path: str | None = None
    url: str | None = Field(default=None, pattern=r"^https?://")
    action_tag: str | None = Field(default=None, pattern=r"^[A-Za-z][A-Za-z0-9_-]*$")
    max_steps: int = Field(default=20, ge=1)
    max_observation_tokens: int = Field(default=1024, ge=1)
    reward: Literal["sum", "last", "task"] = "sum"

    def __post_init__(self):
        if (self.class_path is None) == (self.url is None):
            raise ValueError(
                f"environment.class_path={self.class_path}, environment.url={self.url}: expected exactly one"
            )


def source_of(keys: GymKeys) -> Hosts | OpenEnvServer:
    return Hosts(keys.class_path) if keys.url is None else OpenEnvServer(keys.url, keys.timeout)


class Gym(StatefulEnvironment):
    """The environment of a worker, and by `open` of a prompt."""

    token_end = Ends.TURN

    def __init__(self, keys: GymKeys, template: ChatTemplate):
        super().__init__(InstancePool(keys))
        self.keys, self.template, self.tokenizer = keys, template, template.builder.tokenizer
        self.call_limit, self.task, self.seed = keys.max_steps, None, 0
        self.source = source_of(keys)

    def open(self, row: Mapping[str, Any], seed: int) -> "Gym":
        opened = copy.copy(self)
        StatefulEnvironment.__init__(opened, self.pool)
        opened.task, opened.seed = (row.get("extra_info") or {}).get("environment"), seed
        return opened

    @property
    def can_copy(self) -> bool:  # type: ignore[override]
        return self.source.can_copy

    def create(self) -> Instance:
        return self.source.instance(self.task, self.seed)

    async def stop(self) -> None:
        await self.source.stop()

    # ---- texts ----

    async def first_messages(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Return a prompt's messages with the first observation at the end, in a message of the user."""
        first = self._shown((await self.first_state()).step.observation)
        *before, last = [dict(message) for message in messages] or [{"role": "user", "content": ""}]
        if last["role"] != "user":
            return [*before, last, {"role": "user", "content": first}]
        return [*before, last | {"content": f"{last['content']}\n\n{first}".strip()}]

    async def answer(self, state: State | None, turn: Sequence[int], max_tokens: int) -> Answer:
        if (action := self._action(turn)) is None:  # the environment does not see this turn
            text = f"Error: write your action as <{self.keys.action_tag}>…</{self.keys.action_tag}>"
            return Answer(self._tokens(turn, text, max_tokens), state=state)
        after = await self.advance(state, action)
        step = after.step
        tokens = [] if step.done else self._tokens(turn, step.observation, max_tokens)
        return Answer(tokens, (), after, step.done, step.reward)

    def _action(self, turn: Sequence[int]) -> str | None:
        """Return the action of a turn, behind its thoughts; None if its tag is missing."""
        said = self.tokenizer.decode(list(turn), skip_special_tokens=False)
        text = without_thoughts(said).rpartition("<|message|>")[2]  # gpt-oss's last channel
        if (tag := self.keys.action_tag) is not None:
            before, closed, _ = text.partition(f"</{tag}>")
            _, opened, text = before.rpartition(f"<{tag}>")
            if not (closed and opened):
                return None
        return self.template.control_tokens.removed(text).strip()

    def _tokens(self, turn: Sequence[int], observation: str, max_tokens: int) -> list[int]:
        """Return an observation's tokens; none if they do not fit."""
        tokens = self.template.message(turn, {"role": "user", "content": self._shown(observation)})
        return tokens if len(tokens) <= max_tokens else []

    def _shown(self, observation: str) -> str:
        """Return an observation without control tokens, cut where it is too long."""
        text = self.template.control_tokens.harmless(observation)
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return text if len(ids) <= (n := self.keys.max_observation_tokens) else self.tokenizer.decode(ids[:n])

    def counted_rewards(self, rewards: Sequence[float | None]) -> list[float] | None:
        if self.keys.reward == "task":
            return None
        first = 0
        if self.keys.reward == "last":  # turns that the environment has not seen have none
            first = max((i for i, reward in enumerate(rewards) if reward is not None), default=0)
        return [reward or 0.0 if i >= first else 0.0 for i, reward in enumerate(rewards)]
