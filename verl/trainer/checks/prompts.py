"""Checks that the run's chat template renders the prompts, with the descriptions of tools, in the length allowed.

Upstream counts a prompt that the template cannot render as too long. If all are, the run ends in its first step with a
StopIteration, which names neither the template nor the rows.
"""

import math
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf
from transformers import GenerationConfig, PreTrainedTokenizerBase

from verl.trainer.checks.model.settings import config_folder, model_json
from verl.trainer.checks.rows import local_files
from verl.workers.config.explore import parts_of

ANSWER = "Fine."


def check_prompts(config: DictConfig) -> None:
    """Check one row of each file by the chat template, and that a batch of rows fits into `data.max_prompt_length`.

    Nothing is checked if the tokenizer is not on this machine.
    """
    if (tokenizer := load_tokenizer(config)) is None:
        return
    path = config.actor_rollout_ref.model.path
    count = _counter(config, tokenizer)
    for name, needed in (("train_files", config.data.train_batch_size), ("val_files", 1)):
        for file in local_files(config.data[name]):
            for messages in islice(_prompts(file, config.data.prompt_key), 1):
                try:
                    count(messages)
                except Exception as error:  # a template may raise anything
                    raise ValueError(
                        f"data.{name}: {file}: row 0: the chat template of {path} does not render it: {error!r}"
                    ) from error
        if config.data.get("filter_overlong_prompts"):
            _check_rows_left(config, count, f"data.{name}", needed)


def _check_rows_left(config: DictConfig, count: Callable[[list], int], name: str, needed: int) -> None:
    """Check that the filter of long prompts leaves enough rows; rows are read only until enough have fitted."""
    longest, rows, left = config.data.max_prompt_length, 0, 0
    for file in local_files(OmegaConf.select(config, name)):
        for messages in _prompts(file, config.data.prompt_key):
            rows += 1
            try:
                left += count(messages) <= longest
            except Exception:  # noqa: BLE001 - upstream's filter leaves such a row out
                continue
            if left >= needed:
                return
    if rows >= needed:  # else pictures, which are not counted, or too few rows, which another check names
        raise ValueError(
            f"{name}: {left} of {rows} prompts have at most data.max_prompt_length={longest} tokens, with the chat "
            f"template and the descriptions of tools, and {needed} are needed: raise data.max_prompt_length, or lower "
            "data.train_batch_size"
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
    end = text.rpartition(ANSWER)[2].strip()
    stops = {tokenizer.eos_token_id}
    if (Path(folder) / "generation_config.json").exists():
        own = GenerationConfig.from_pretrained(folder).eos_token_id
        stops |= set(own if isinstance(own, list) else [own])
    if not end or stops & set(tokenizer.encode(end, add_special_tokens=False)):
        return ""
    known = ", ".join(repr(tokenizer.decode([stop])) for stop in sorted(stops - {None}))
    return (
        f"{path}: its chat template ends a turn with {end!r}, and the engine stops at {known or 'no token'}: a "
        "response that ends as the template says goes on to data.max_response_length; add the token to eos_token_id "
        "in generation_config.json"
    )


def load_tokenizer(config: DictConfig) -> PreTrainedTokenizerBase | None:
    """Return the run's tokenizer; None if it is not on this machine.

    Raises:
        ValueError: the model's folder is here, and holds no tokenizer that loads, or no chat template.
    """
    from verl.utils.tokenizer import hf_tokenizer

    model = config.actor_rollout_ref.model
    path = model.get("tokenizer_path") or model.path
    if (folder := config_folder(path)) is None and not Path(path).is_dir():
        return None
    try:
        tokenizer = hf_tokenizer(str(folder or path), trust_remote_code=bool(model.get("trust_remote_code")))
    except Exception as error:
        if not Path(path).is_dir():  # the hub's cache may hold no more than the config
            return None
        raise ValueError(f"actor_rollout_ref.model.path={path} has no tokenizer that loads: {error}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # transformers makes an empty one where there are no files
        raise ValueError(f"actor_rollout_ref.model.path={path} has no tokenizer: its vocabulary is empty")
    tokenizer.chat_template = model.get("custom_chat_template") or tokenizer.chat_template
    if not tokenizer.chat_template:
        raise ValueError(
            f"actor_rollout_ref.model.path={path} has no chat template, with which every prompt is rendered: set "
            "actor_rollout_ref.model.custom_chat_template"
        )
    return tokenizer


def _describer(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[list], list]:
    """Return the function that adds the tools' descriptions to a prompt's messages; `list` if the config wants none."""
    rollout = config.actor_rollout_ref.rollout
    if parts_of(rollout).environment != "tools" or not rollout.tools.describe_in_prompt:
        return list
    from verl.workers.rollout.tree_rollout import environment_of

    return environment_of(config, tokenizer).prompt_messages


def _upstream_tools(*files: str | None) -> list[dict]:
    """Return the schemas of upstream's tools in the files `data.tool_config_path` and `data.function_tool_path`."""
    if not any(files):
        return []
    from verl.tools.tool_registry import load_all_tools

    tools = load_all_tools(tool_config_path=files[0], function_tool_path=files[1])
    return [tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True) for tool in tools]


def _options(config: DictConfig) -> dict:
    return OmegaConf.to_container(config.data.get("apply_chat_template_kwargs") or OmegaConf.create())


def _counter(config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[list], int]:
    """Return the function that counts a prompt's tokens as the run does, with the descriptions of all tools."""
    from verl.utils.tokenizer import normalize_token_ids

    describe, options = _describer(config, tokenizer), _options(config)
    vocabulary = (model_json(config.actor_rollout_ref.model.path) or {}).get("vocab_size", math.inf)
    if tools := _upstream_tools(config.data.get("tool_config_path"), config.data.get("function_tool_path")):
        options |= {"tools": tools}

    def count(messages: list) -> int:
        ids = tokenizer.apply_chat_template(describe(messages), add_generation_prompt=True, **options)
        if (largest := max(ids := normalize_token_ids(ids), default=0)) >= vocabulary:
            raise ValueError(f"token {largest} is not in the model's vocabulary of {vocabulary}")
        return len(ids)

    return count


def _prompts(file: str, key: str) -> Iterator[list]:
    """Yield the messages of each row that holds texts alone; pictures need the model's processor."""
    for batch in pq.ParquetFile(file).iter_batches(batch_size=1024, columns=[key]):
        for messages in batch.column(0).to_pylist():
            if all(isinstance(message.get("content"), str) for message in messages):
                yield messages
