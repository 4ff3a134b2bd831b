"""Checks that the run's chat template renders the prompts, with the descriptions of tools, in the length allowed.

Upstream counts a prompt that the template cannot render as too long. If all are, the run ends in its first step with a
StopIteration, which names neither the template nor the rows.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl.trainer.checks.model.settings import config_folder, model_json
from verl.trainer.checks.rows import data_files
from verl.utils.data_files import read_rows
from verl.workers.config.explore import parts_of
from verl.workers.rollout.engines.interface import result_in_thread
from verl.workers.rollout.environment import NO_ENVIRONMENT, Environment

ANSWER = "Fine."


def check_prompts(config: DictConfig) -> None:
    """Check one row of each file by the chat template, and that a batch of rows fits into `data.max_prompt_length`.
    With descriptions of tools, which the filter of long prompts does not count, all rows must fit."""
    if (tokenizer := load_tokenizer(config)) is None:
        return
    environment = _described_by(config, tokenizer)
    plain = _counter(config, tokenizer)
    described = _counter(config, tokenizer, environment) if environment else None
    for key, needed in (("train_files", config.data.train_batch_size), ("val_files", 1)):
        _check_rows(config, key, needed, plain, described)


def _check_rows(config: DictConfig, key: str, needed: int, plain: Callable, described: Callable | None) -> None:
    """Check each file's first row, that the filter, which counts as `plain` does, leaves enough rows, and that these
    fit as `described` counts them. Without descriptions it reads until enough rows have fitted."""
    limit, filters = config.data.max_prompt_length, config.data.get("filter_overlong_prompts")
    (files, all_are_here), rows, left, long, longest = data_files(config, key), 0, 0, 0, 0
    for file in files:
        for number, row in enumerate(read_rows(Path(file), [config.data.prompt_key])):
            rows, messages = rows + 1, row[config.data.prompt_key]
            try:  # pictures need the model's processor, and are not counted
                is_text = all(isinstance(message.get("content"), str) for message in messages)
                tokens = (described or plain)(messages) if is_text else 0
                is_left = not filters or tokens <= limit or plain(messages) <= limit
            except Exception as error:  # a template may raise anything, and upstream's filter leaves such rows out
                if number == 0:
                    template = f"the chat template of {config.actor_rollout_ref.model.path}"
                    raise ValueError(f"data.{key}: {file}: row 0: {template} does not render it: {error!r}") from error
                continue
            left += is_left
            if described and is_left and tokens >= limit:
                long, longest = long + 1, max(longest, tokens)
            if not described and (left >= needed or not filters):
                break
    if long:
        raise ValueError(
            f"data.{key}: {long} prompts do not fit into data.max_prompt_length={limit} with the tools' descriptions: "
            f"set it to more than {longest}, name fewer tools, or leave these rows out"
        )
    if filters and all_are_here and left < needed <= rows:  # another check names too few rows
        raise ValueError(
            f"data.{key}: {left} of {rows} prompts have at most data.max_prompt_length={limit} tokens with the "
            f"template, and {needed} are needed: raise it, or lower data.train_batch_size"
        )


def turn_end_warning(config: DictConfig) -> str:
    """Return a warning if the chat template ends the model's turns with a token at which the engine does not stop."""
    path = config.actor_rollout_ref.model.path
    if (tokenizer := load_tokenizer(config)) is None or (folder := config_folder(path)) is None:
        return ""
    messages = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **_options(config))
    except Exception:  # a template for other conversations; `check_prompts` renders the run's own
        return ""
    end, stops = text.rpartition(ANSWER)[2].strip(), {tokenizer.eos_token_id}
    if (folder / "generation_config.json").exists():
        own = GenerationConfig.from_pretrained(folder).eos_token_id
        stops |= set(own if isinstance(own, list) else [own])
    if not end or stops & set(tokenizer.encode(end, add_special_tokens=False)):
        return ""
    texts = ", ".join(repr(tokenizer.decode([stop])) for stop in sorted(stops - {None}))
    return (
        f"{path}: its chat template ends a turn with {end!r}, and the engine stops at {texts or 'no token'}: responses "
        "go on to data.max_response_length; add the token to eos_token_id in generation_config.json"
    )


def load_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase | None:
    """Return the run's tokenizer; None if it is not on this machine, or if the model's processor has the template."""
    from verl.utils.tokenizer import hf_tokenizer

    model = config.actor_rollout_ref.model
    path = Path(model.get("tokenizer_path") or model.path).expanduser()
    if (folder := path if path.is_dir() else config_folder(str(path))) is None:
        return None
    try:
        tokenizer = hf_tokenizer(str(folder), trust_remote_code=bool(model.get("trust_remote_code")))
        if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes one where there are no files
            raise ValueError("its vocabulary is empty")
    except Exception as error:
        if not path.is_dir():  # the hub's cache may hold no more than the config
            return None
        raise ValueError(f"actor_rollout_ref.model.path={path} has no tokenizer that loads: {error}") from error
    tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
    if tokenizer.chat_template:
        return tokenizer
    if not path.is_dir() or any(folder.glob("*processor_config.json")):
        return None
    key = "actor_rollout_ref.model"
    raise ValueError(f"{key}.path={path} has no chat template, which prompts need: set {key}.custom_chat_template")


def _options(config: DictConfig) -> dict:
    return OmegaConf.to_container(config.data.get("apply_chat_template_kwargs") or OmegaConf.create())


def _described_by(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Environment | None:
    """Return the environment, closed, if it describes tools in the prompts; else None."""
    if parts_of(config.actor_rollout_ref.rollout).environment != "chat":
        return None
    from verl.workers.rollout.run_environment import environment_of

    opened = environment_of(config, tokenizer)
    result_in_thread(opened.stop())
    return opened


def _counter(
    config: DictConfig, tokenizer: PreTrainedTokenizerBase, environment: Environment = NO_ENVIRONMENT
) -> Callable[[Sequence[Mapping]], int]:
    """Return the function that counts a prompt's tokens as the run does, with the tools that it describes."""
    from verl.utils.tokenizer import normalize_token_ids

    options = _options(config)
    vocabulary = (model_json(config.actor_rollout_ref.model.path) or {}).get("vocab_size", math.inf)
    if environment.schemas:
        options |= {"tools": environment.schemas}

    def count(messages: Sequence[Mapping]) -> int:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
        if (largest := max(ids := normalize_token_ids(ids), default=0)) >= vocabulary:
            raise ValueError(f"token {largest} is not in the model's vocabulary of {vocabulary}")
        return len(ids)

    return count
