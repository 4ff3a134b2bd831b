"""The settings that decide an evaluation's numbers beside the model: sampling, prompt, scoring and judge."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf
from verl.workers.config.rollout import MultiTurnConfig

from verl.evaluation.model.checkpoint import Checkpoint
from verl.evaluation.questions.loading import QuestionSet
from verl.evaluation.questions.prompts import to_messages
from verl.trainer.checkpoint_marker import saved_config
from verl.workers.config.keys import read_keys
from verl.workers.rollout.contexts import ContextKeys
from verl.workers.rollout.gym.environment import GymKeys
from verl.workers.rollout.stateful import InstanceKeys

# the sampling parameters of a request; those that are left out here have no effect, see `server.NEUTRAL`
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "stop")
FILES_OWN = "the file's own"


def chat_template_kwargs(config: DictConfig, checkpoint: Checkpoint | None) -> dict:
    """Return `apply_chat_template_kwargs`; if the key is null, those with which the checkpoint's run was trained. They
    are empty if the key is null and the model comes from elsewhere, or its checkpoint holds no config."""
    if config.apply_chat_template_kwargs is not None:
        return _plain(config.apply_chat_template_kwargs)
    run = _run_of(checkpoint)
    return _plain(run.data.get("apply_chat_template_kwargs") or {}) if run is not None else {}


class EnvironmentChoice(NamedTuple):
    """The environment that answers the model."""

    name: str  # `tools` (calls in tags, or no tools), `chat` or `gym`
    multi_turn: MultiTurnConfig  # for `chat`
    keys: GymKeys | None = None  # keys under `environment`, for `gym`
    contexts: ContextKeys = ContextKeys()  # parts of earlier turns that a turn reads

    @property
    def about(self) -> str:
        """The name, and the keys of contexts that change what is read."""
        keys = self.contexts
        thinking = [f"thinking={keys.thinking}"] if keys.thinking != "kept" else []
        return ", ".join([self.name, *thinking, *([f"max_context={keys.max_context}"] if keys.max_context else [])])


def environment_choice(config: DictConfig, checkpoint: Checkpoint | None, has_tasks: bool) -> EnvironmentChoice:
    """Return what answers the model. Without a choice of `environment` it is that with which the checkpoint was
    trained, but `gym` only if the questions have tasks for it; else `tools`."""
    run = config if "actor_rollout_ref" in config else _run_of(checkpoint)
    rollout = run.actor_rollout_ref.rollout if run is not None else OmegaConf.create()
    keys = {name: value for name, value in (rollout.get("multi_turn") or {}).items() if not name.startswith("_")}
    environment = rollout.get("environment") or "none"
    if run is config and environment not in ("tools", "chat", "gym"):
        raise ValueError(
            f"environment={environment}: expected tools, chat or gym; leave it out for the checkpoint's own"
        )
    if run is not None and environment == "gym" and (run is config or has_tasks):
        gym_keys = read_keys(GymKeys, run.environment, "environment")
        return EnvironmentChoice("gym", MultiTurnConfig(), gym_keys, gym_keys)
    contexts = ContextKeys()
    if run is not None and environment in ("tools", "chat"):
        contexts = read_keys(InstanceKeys, run.get("environment"), "environment")
    return EnvironmentChoice("chat" if environment == "chat" else "tools", MultiTurnConfig(**keys), None, contexts)


def _run_of(checkpoint: Checkpoint | None) -> DictConfig | None:
    """Return the config of the run that trained a checkpoint; None if the model comes from elsewhere."""
    parents = Path(checkpoint.model).parents if checkpoint else ()
    folder = next((parent for parent in parents if parent.name.startswith("global_step_")), None)
    return saved_config(folder) if folder else None


def prompt_style(config: DictConfig, questions: QuestionSet, tool_tags: Sequence[str]) -> str:
    """Return the style of the prompts, such as `boxed`, or `boxed, system: <message>` with a system message. FILES_OWN
    if the questions' file has prompts of its own."""
    style, first = config.style or questions.benchmark.style, questions.questions[0]
    if first.prompt != to_messages(first.text, style, tool_tags, config.system):
        return FILES_OWN
    return style if config.system is None else f"{style}, system: {config.system}"


def sampling_of(config: DictConfig) -> dict:
    """Return the sampling parameters of every request, without its seed."""
    return {name: _plain(config[name]) for name in SAMPLING}


def _plain(value):
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
