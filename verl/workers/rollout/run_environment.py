"""Makes the environment that a run's config chooses, and tries it on this machine."""

from typing import Any

from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tokenizer.continuous_token import ContinuousTokenBuilder

from verl.workers.config.explore import parts_of
from verl.workers.config.keys import read_keys
from verl.workers.rollout.chat.calls import CallReader
from verl.workers.rollout.chat.environment import Chat
from verl.workers.rollout.chat.template import ChatTemplate, builder_of_model
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment
from verl.workers.rollout.gym.environment import GymKeys, make_gym, try_gym
from verl.workers.rollout.stateful import InstanceKeys, InstancePool
from verl.workers.rollout.tools.environment import Tools
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.tools.tool_box import ToolBox, try_tools


def environment_keys(config) -> InstanceKeys:
    """Return the settings under `environment` of a run's config; raise a ValueError that names a wrong key."""
    chosen, keys = parts_of(config.actor_rollout_ref.rollout).environment, config.get("environment")
    if chosen != "gym" and (key := next((key for key in ("class_path", "url") if (keys or {}).get(key)), None)):
        raise ValueError(f"environment.{key}={keys[key]} needs environment=gym; this run has environment={chosen}")
    return read_keys(GymKeys if chosen == "gym" else InstanceKeys, keys, "environment")


def environment_of(config, tokenizer, builder: ContinuousTokenBuilder | None = None) -> Environment:
    """Return the environment of a run's config with its tools loaded.

    Args:
        builder: upstream's builder for the chat template; None to make one for the model of the config.

    Raises:
        ValueError: a tool does not work, or the chat template does not fit.
    """
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    environment, keys = parts_of(rollout).environment, environment_keys(config)
    if environment == "none":
        return NO_ENVIRONMENT
    if environment == "gym":
        return make_gym(keys, tokenizer, lambda: _template(config, tokenizer, builder))
    if environment == "chat":
        reader = CallReader(rollout.multi_turn.format, tokenizer)
        template = _template(config, tokenizer, builder, closes=not reader.stop_token_ids)
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


def try_environment(config, task: Any) -> None:
    """Try what answers the model on this machine: the tools, or a reset of the environment for a task.

    Raises:
        ValueError: it does not work; names the key.
    """
    rollout = config.actor_rollout_ref.rollout
    tree, environment = parts_of(rollout)
    if environment == "gym":
        try_gym(environment_keys(config), task)
    elif environment != "none":
        try_tools(omega_conf_to_dataclass(rollout).tools, tree)
