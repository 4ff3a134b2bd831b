"""Makes the environment that a run's config chooses, and tries it on this machine: whether it starts, and whether a
second instance returns the same."""

import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from verl.utils.fault_reports import cause_of
from verl.workers.config.explore import parts_of
from verl.workers.config.keys import read_keys
from verl.workers.rollout.agent.environment import Agent, AgentInstance, AgentKeys, Agents, Said, row_of_agent
from verl.workers.rollout.agent.gateway import Reply
from verl.workers.rollout.chat.calls import CallReader
from verl.workers.rollout.chat.environment import Chat
from verl.workers.rollout.chat.template import ChatTemplate, builder_of_model
from verl.workers.rollout.contexts import ContextRule
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.gym.environment import Gym, GymKeys, source_of
from verl.workers.rollout.gym.openenv import OpenEnvServer
from verl.workers.rollout.gym.process import Hosts
from verl.workers.rollout.stateful import CLOSE_SECONDS, Instance, InstanceKeys, InstancePool, Step, result_in_time
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, try_tools

MAX_REFUSALS = 5  # number of failed attempts to start, 1.5 seconds: a server may still be closing the last session
SHOWN_BEFORE, SHOWN_AFTER = 200, 300  # characters of two requests before and after their first difference


def environment_keys(config) -> InstanceKeys:
    """Return the settings under `environment` of a run's config; raise a ValueError that names a wrong key."""
    chosen, values = parts_of(config.actor_rollout_ref.rollout).environment, config.get("environment")
    set_keys = [key for key in ("class_path", "url", "command") if (values or {}).get(key)]
    if chosen not in ("gym", "agent") and set_keys:
        key = set_keys[0]
        raise ValueError(f"environment.{key}={values[key]} needs environment=gym or agent, and not {chosen}")
    keys = {"gym": GymKeys, "agent": AgentKeys}.get(chosen, InstanceKeys)
    return read_keys(keys, values, "environment")


def changes_contexts(config) -> bool:
    """Return whether a run's turns may read anything but everything before them (contexts.py)."""
    return environment_keys(config).change_contexts


def context_rule_of(config, tokenizer) -> ContextRule | None:
    """Return what turns read by a run's config; None if that is everything before them."""
    keys = environment_keys(config)
    is_agent = isinstance(keys, AgentKeys)  # an agent chooses what its turns read
    return ContextRule(keys, tokenizer) if keys.change_contexts and not is_agent else None


def environment_of(config, tokenizer, builder: ContinuousTokenBuilder | None = None) -> Environment:
    """Return the environment of a run's config with its tools loaded, which have been tried. Without a `builder` for
    the chat template, one is made for the config's model."""
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    environment, keys = parts_of(rollout).environment, environment_keys(config)
    if environment == "none":
        return NO_ENVIRONMENT
    if environment == "gym":
        return Gym(keys, _template(config, tokenizer, builder))
    if environment in ("chat", "agent"):
        reader = CallReader(rollout.multi_turn.format, tokenizer)
        template = _template(config, tokenizer, builder, closes=not reader.stop_token_ids)
    if environment == "agent":
        return Agent(keys, template, reader)
    try_tools(rollout.tools, parts_of(rollout).tree)
    tools, pool = ToolBox(rollout.tools), InstancePool(keys)
    if environment == "chat":
        return Chat(tools, reader, template, rollout.multi_turn, pool)
    return Tools(tools, Protocol(tokenizer, list(tools.tools)), pool)


def _template(config, tokenizer, builder: ContinuousTokenBuilder | None, closes: bool = True) -> ChatTemplate:
    if builder is None:
        options = config.data.get("apply_chat_template_kwargs") or {}
        builder = builder_of_model(tokenizer, config.actor_rollout_ref.model.path, options)
    return ChatTemplate(builder, closes=closes)


def try_environment(config, row: Mapping[str, Any]) -> None:
    """Try the tools, or a reset of the environment for a row; raise ValueError, which names the key, if it fails."""
    rollout = config.actor_rollout_ref.rollout
    tree, environment = parts_of(rollout)
    if environment == "gym":
        try_gym(environment_keys(config), (row.get("extra_info") or {}).get("environment"))
    elif environment == "agent":
        try_agent(environment_keys(config), row)
    elif environment != "none":
        try_tools(omega_conf_to_dataclass(rollout).tools, tree)


def try_gym(keys: GymKeys, task: Any, actions: Sequence[str] = ()) -> list[Step]:
    """Reset an instance for a task, take actions, and return the steps, the reset's first. With actions, take them
    again in a second instance and in copies of it. Raise ValueError, which names the key, if the class or the server
    does not work, or these return something else. Works inside and outside an event loop."""
    source = source_of(keys)
    key = f"environment.{'class_path' if keys.url is None else 'url'}={keys.class_path or keys.url}"
    reset = f"reset with the task {task!r:.200}"
    trial = _Trial(source, lambda: source.instance(task, 0), key, reset, actions, keys.timeout)
    return result_in_thread(trial.run(again=bool(actions)))


def try_agent(keys: AgentKeys, row: Mapping[str, Any], replies: Sequence[Reply] = (), max_steps: int = 0) -> list[Step]:
    """Start the program twice with a row, and return its requests and its outcome. It gets at most `max_steps` of the
    replies in turn, the last one again and again. Raise ValueError, which names the key, if it cannot be started, sends
    no request, or sends others in the second run."""
    key = f"environment.class_path={keys.class_path}" if keys.command is None else f"environment.command={keys.command}"
    agents, task = Agents(keys), row_of_agent(row, 0)
    actions = [Said(replies[min(i, len(replies) - 1)]) for i in range(max_steps if replies else 0)]
    trial = _Trial(agents, lambda: AgentInstance(agents, task), key, "its start", actions, keys.timeout)
    return result_in_thread(trial.run(again=True))


@dataclass
class _Trial:
    """Actions in two instances, of which the second must return the same."""

    source: Hosts | OpenEnvServer | Agents  # the source that the instances share
    new_instance: Callable[[], Instance]
    key: str  # config key and value, for messages
    reset: str  # description of the reset, for messages
    actions: Sequence[Any]
    seconds: float  # time limit of a call
    steps: list[Step] = field(default_factory=list)
    refusals: int = 0

    async def run(self, again: bool) -> list[Step]:
        try:
            async with self._instance() as (instance, first):
                self.steps = [first, *await self._taken(instance, self.actions)]
            if again:
                await self._take_again()
            return self.steps
        finally:
            await self.source.stop()

    async def _take_again(self) -> None:
        """Compare a second instance with the first one; before each of its actions a copy takes all that follow."""
        who = "a second instance"
        async with self._instance() as (instance, first):
            self._compare(who, [first], 0)
            for i in range(len(self.steps) - 1):
                if self.source.can_copy:
                    copy = await self._call("a copy", instance.copy())
                    try:
                        self._compare("a copy", await self._taken(copy, self.actions[i:]), i + 1)
                    finally:
                        await result_in_time(copy.close(), CLOSE_SECONDS)
                    who = "an instance whose copy had taken other actions"
                self._compare(who, await self._taken(instance, self.actions[i : i + 1]), i + 1)

    def _compare(self, who: str, steps: Sequence[Step], start: int) -> None:
        for i, (step, expected) in enumerate(zip(steps, self.steps[start:], strict=False), start):
            if step != expected:
                raise ValueError(f"{self.key}: {self._difference(who, i, step)}")

    def _difference(self, who: str, i: int, step: Step) -> str:
        expected = self.steps[i]
        if not isinstance(self.source, Agents):
            action = f"the action {self.actions[i - 1]!r:.100} (number {i})" if i else "the reset"
            return f"{action} returned {expected}, and in {who} {step}"
        one, other = (str(s.observation) if s.done else "\n".join(s.observation.texts) for s in (expected, step))
        begin = max(len(os.path.commonprefix([one, other])) - SHOWN_BEFORE, 0)
        end = begin + SHOWN_BEFORE + SHOWN_AFTER
        but = "; tree=plain can train it" if i else ""
        return (
            f"two runs with the same answers differ, so that trees cannot branch it{but}. environment.ignored leaves "
            f"out what may differ. Request {i + 1}:\n{one[begin:end]}\nand in the second run:\n{other[begin:end]}"
        )

    @asynccontextmanager
    async def _instance(self) -> AsyncIterator[tuple[Instance, Step]]:
        instance = self.new_instance()
        try:
            await self._call("its start", instance.prepare(self._refuse), limited=False)
            yield instance, Step(await self._call(self.reset, instance.reset()))
        finally:
            await result_in_time(instance.close(), CLOSE_SECONDS)

    async def _taken(self, instance: Instance, actions: Sequence[Any]) -> list[Step]:
        steps: list[Step] = []
        for action in actions:
            if steps and steps[-1].done:
                break
            steps.append(await self._call(f"the action {action!r:.100}", instance.step(action)))
        return steps

    async def _call(self, what: str, call: Coroutine, limited: bool = True) -> Any:
        try:
            return await result_in_time(call, self.seconds if limited else None)
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{self.key}: {what} failed: {cause_of(error)}") from error

    def _refuse(self, reason: Exception) -> None:
        self.refusals += 1
        if self.refusals > MAX_REFUSALS:
            raise ValueError(f"{self.key}: {reason}") from reason
