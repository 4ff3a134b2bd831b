"""Makes the environment that a run's config chooses, and tries it on this machine."""

from collections.abc import Mapping
from typing import Any

from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from verl.workers.config.explore import parts_of
from verl.workers.config.keys import read_keys
from verl.workers.rollout.agent.environment import Agent, AgentKeys
from verl.workers.rollout.chat.calls import CallReader
from verl.workers.rollout.chat.environment import Chat
from verl.workers.rollout.chat.template import ChatTemplate, builder_of_model
from verl.workers.rollout.contexts import ContextRule
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.gym.environment import GymKeys, make_gym
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, try_tools
from verl.workers.rollout.trial import try_agent, try_gym


def environment_keys(config) -> InstanceKeys:
    """Return the settings under `environment` of a run's config; raise a ValueError that names a wrong key."""
    chosen, values = parts_of(config.actor_rollout_ref.rollout).environment, config.get("environment")
    set_keys = [key for key in ("class_path", "url", "command") if (values or {}).get(key)]
    if chosen not in ("gym", "agent") and set_keys:
        key = set_keys[0]
        raise ValueError(
            f"environment.{key}={values[key]} needs environment=gym or agent; this run has environment={chosen}"
        )
    keys = {"gym": GymKeys, "agent": AgentKeys}.get(chosen, InstanceKeys)
    return read_keys(keys, values, "environment")


def changes_contexts(config) -> bool:
    """Return whether a run's turns may read anything but everything before them (contexts.py)."""
    return environment_keys(config).change_contexts


def context_rule_of(config, tokenizer) -> ContextRule | None:
    """Return what turns read by a run's config; None if that is everything before them."""
    keys = environment_keys(config)
    is_agent = isinstance(keys, AgentKeys)  # which says itself what a turn reads
    return ContextRule(keys, tokenizer) if keys.change_contexts and not is_agent else None


def environment_of(config, tokenizer, builder: ContinuousTokenBuilder | None = None) -> Environment:
    """Return the environment of a run's config with its tools loaded, which have been tried. Without a `builder` for
    the chat template, one is made for the config's model."""
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    environment, keys = parts_of(rollout).environment, environment_keys(config)
    if environment == "none":
        return NO_ENVIRONMENT
    if environment == "gym":
        return make_gym(keys, tokenizer, lambda: _template(config, tokenizer, builder))
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
