"""The settings that decide an evaluation's numbers beside the model: sampling, prompt, scoring and judge."""

from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from verl.evaluation.model.checkpoint import Checkpoint
from verl.evaluation.questions.loading import QuestionSet
from verl.evaluation.questions.prompts import to_messages
from verl.trainer.checkpoint_marker import saved_config

# the sampling parameters of a request; those that are left out here have no effect, see `server.NEUTRAL`
SAMPLING = ("temperature", "top_p", "top_k", "max_tokens", "repetition_penalty", "stop")
FILES_OWN = "the file's own"


def chat_template_kwargs(config: DictConfig, checkpoint: Checkpoint | None) -> dict:
    """Return `apply_chat_template_kwargs`; if the key is null, those with which the checkpoint's run was trained.

    They are empty if the key is null and the model comes from elsewhere, or its checkpoint holds no config.
    """
    if config.apply_chat_template_kwargs is not None:
        return _plain(config.apply_chat_template_kwargs)
    parents = Path(checkpoint.model).parents if checkpoint else ()
    folder = next((parent for parent in parents if parent.name.startswith("global_step_")), None)
    run = saved_config(folder) if folder else None
    return _plain(run.data.get("apply_chat_template_kwargs") or {}) if run is not None else {}


def prompt_style(config: DictConfig, questions: QuestionSet, tool_tags: Sequence[str]) -> str:
    """Return the style of the prompts, such as `boxed`, or `boxed, system: <message>` with a system message.

    FILES_OWN if the questions' file has prompts of its own.
    """
    style, first = config.style or questions.benchmark.style, questions.questions[0]
    if first.prompt != to_messages(first.text, style, tool_tags, config.system):
        return FILES_OWN
    return style if config.system is None else f"{style}, system: {config.system}"


def sampling_of(config: DictConfig) -> dict:
    """Return the sampling parameters of every request, without its seed."""
    return {name: _plain(config[name]) for name in SAMPLING}


def reported_settings(config: DictConfig, prompt: str, template: dict, scoring: str) -> dict:
    """Return the settings that a result line names, in JSON's types."""
    judge = (config.judge.name or config.judge.url) if scoring == "judge" else "none"
    settings = sampling_of(config) | {"seed": config.seed, "prompt": prompt, "apply_chat_template_kwargs": template}
    return settings | {"tools": sorted(config.tools.tool_instances), "scoring": scoring, "judge": judge}


def _plain(value):
    """Return a config's value in Python's own types."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
