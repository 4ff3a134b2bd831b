"""Checks the data of a run before Ray starts: every row has a prompt, and a ground truth by which the reward can score.

In training, a row that the reward refuses would fail its whole group in every step, after the rollout. Each check
raises a ValueError for the first problem, which names the key, the file, the row (0 for the first) and what is wrong.
"""

import asyncio
import inspect
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from verl.utils import reward_score
from verl.utils.data_files import extra_info_of, read_rows
from verl.utils.parts import credit_of
from verl.utils.token_fields import RewardField
from verl.utils.user_code import finite_number
from verl.workers.config.explore import needs_answers
from verl.workers.config.schedule import filters_groups
from verl.workers.rollout.answer_likelihood import reference_answers
from verl.workers.rollout.engines.interface import result_in_thread

REWARD = "reward.custom_reward_function"
CONVERT = "docs/coming_from.md says how to convert other files"
# columns of the batch, which upstream's rollout or ours reads or writes
TAKEN_COLUMNS = {"validate", "prompts", "responses", "response_mask", "rm_scores", "__rollout_n__", "__do_sample__"}
FILTER_METRIC = "algorithm.filter_groups.metric"
MANAGERS_METRICS = ("reward", "response_length", "overlong", "overlong_reward")  # not of the reward function


def local_files(files) -> list[str]:
    """Return the local files among `data.*_files`, a file or a list; upstream can also read remote ones and JSON."""
    files = [files] if isinstance(files, str) else list(files or [])
    return [os.path.expanduser(file) for file in files if "://" not in file and not file.endswith((".json", ".jsonl"))]


def data_files(config: DictConfig, key: str) -> tuple[list[str], bool]:
    """Return the files of `data.{key}` whose rows can be checked, and whether these are all. A run with a dataset class
    of its own (`data.custom_cls`) has none: its rows may have any form."""
    if OmegaConf.select(config, "data.custom_cls.path"):
        return [], False
    files = local_files(config.data[key])
    return files, len(files) == (1 if isinstance(config.data[key], str) else len(config.data[key] or []))


def check_prompt_lengths(config: DictConfig) -> None:
    """Check that long prompts are treated as `data.truncation` says. Upstream reads it nowhere: the filter leaves long
    prompts out, and without the filter all are cut on the left."""
    filters, truncation = config.data.get("filter_overlong_prompts"), config.data.get("truncation", "error")
    if not filters and truncation != "left":
        raise ValueError(
            f"data.truncation={truncation} has no effect with data.filter_overlong_prompts=false: long prompts would "
            "be cut on the left; set data.filter_overlong_prompts=true, which leaves them out, or data.truncation=left"
        )


# ---- prompts ----


def check_data_files(key: str, files, prompt_key: str) -> None:
    """Check that the files are parquet and that every row has a prompt, a data source and a ground truth."""
    if not files:
        raise ValueError(f"{key} is empty: name a parquet file")
    for file in local_files(files):
        if not os.path.exists(file):
            raise ValueError(f"{key}: {file} does not exist")
        try:
            schema = pq.read_schema(file)
        except (pa.ArrowInvalid, OSError) as error:
            raise ValueError(f"{key}: {file} is not a readable parquet file ({error})") from error
        for column in (prompt_key, "data_source", "reward_model"):
            if column not in schema.names:
                raise ValueError(
                    f"{key}: {file} has no column '{column}'; its columns: {', '.join(schema.names)}; {CONVERT}"
                )
        if taken := sorted(TAKEN_COLUMNS & set(schema.names)):
            raise ValueError(f"{key}: {file} has the column '{taken[0]}', a name that the rollout uses: rename it")
        number = -1
        for number, row in enumerate(read_rows(Path(file), (prompt_key, "data_source", "reward_model"))):
            if problem := _problem(row, prompt_key):
                raise ValueError(f"{key}: {file}: row {number}: {problem}")
        if number < 0:
            raise ValueError(f"{key}: {file} has no rows")


def _problem(row: dict, prompt_key: str) -> str | None:
    """Return what is wrong with a row; None if nothing is. A message has a role, and a text or, with pictures, a list
    of parts; one that calls tools may have no content."""
    messages, answer, column = row[prompt_key], row["reward_model"], f"column '{prompt_key}'"
    if messages is None or messages == []:
        return f"{column} is empty"
    for each in messages if isinstance(messages, list) else [None]:
        if not isinstance(each, dict) or not {"role", "content"} <= each.keys():
            return f"{column} must hold lists of {{role, content}} messages; {CONVERT}"
        if not isinstance(each["role"], str) or not (isinstance(each["content"], str | list) or each.get("tool_calls")):
            return f"{column}: a message has no role or no content"
    if row["data_source"] is None:
        return "column 'data_source' is empty"
    if not isinstance(answer, dict) or answer.get("ground_truth") is None:
        return "reward_model.ground_truth is empty"
    return None


# ---- the reward ----


def check_reward_rows(config: DictConfig) -> None:
    """Check every row by `check_row(data_source, ground_truth, extra_info, **reward_kwargs)` of the reward's module.

    Without `check_row` the reward function, the run's own or upstream's, is tried for the first row of each data source
    of a file, and else for the first row if the run reads further numbers of it; not if `trainer.try_reward` is false
    or it needs a model that only the run serves.
    """
    reward = config.reward.custom_reward_function
    is_own = bool(reward.get("path"))
    module, name = (_reward_module(reward), reward.name) if is_own else (reward_score, "default_compute_score")
    settings = OmegaConf.to_container(reward.get("reward_kwargs") or OmegaConf.create(), resolve=True)
    check = getattr(module, "check_row", None)
    manager = OmegaConf.select(config, "reward.reward_manager.source", default="register")
    tries = config.trainer.get("try_reward", True) and (is_own or manager == "register")  # another one may score
    tries = tries and not OmegaConf.select(config, "reward.reward_model.enable", default=False)
    if check is None and not tries:
        return
    for key in ("train_files", "val_files"):
        numbers = _numbers_read(config) if key == "train_files" else []
        for file in data_files(config, key)[0]:
            untried = set(pq.read_table(file, columns=["data_source"])["data_source"].unique().to_pylist())
            for number, row in enumerate(_reward_fields(file)):
                if check is None and row["data_source"] not in untried:
                    continue
                untried.discard(row["data_source"])
                try:
                    if check:
                        check(**row, **settings)
                    if check is None or (tries and numbers and number == 0):
                        _try(getattr(module, name), row, settings, numbers)
                except ValueError as error:
                    raise ValueError(f"data.{key}: {file}: row {number}: {error}") from error
                if check is None and not untried:
                    break


def _numbers_read(config: DictConfig) -> list[RewardField]:
    """Return the numbers beside the score that credit and group filter read of the reward function."""
    credit = credit_of(OmegaConf.select(config, "algorithm.adv_estimator"))
    numbers = list(credit.reward_fields) if credit else []
    metric = OmegaConf.select(config, FILTER_METRIC)
    if filters_groups(config) and metric and metric not in MANAGERS_METRICS:
        numbers.append(RewardField(metric, FILTER_METRIC))
    return numbers


def check_reference_answers(config: DictConfig) -> None:
    """Check that every training row has a reference answer, if the run scores answers during the rollout."""
    if key := needs_answers(config):
        for file in data_files(config, "train_files")[0]:
            for number, row in enumerate(_reward_fields(file)):
                try:
                    reference_answers({"reward_model": row})
                except ValueError as error:
                    raise ValueError(f"data.train_files: {file}: row {number}: {key}: {error}") from error


def _reward_module(reward: DictConfig) -> Any:
    """Load and return the module of the reward function."""
    from verl.utils.import_utils import load_module

    try:
        module = load_module(reward.path)
    except Exception as error:
        raise ValueError(f"{REWARD}.path={reward.path} does not load: {error.__cause__ or error}") from error
    if not hasattr(module, reward.name):
        raise ValueError(f"{REWARD}.name={reward.name}: {reward.path} has no such function")
    return module


def _reward_fields(file: str) -> Iterator[dict]:
    """Yield the data fields that a reward function gets for each row of a file."""
    names = ("data_source", "reward_model", "ability", "extra_info")
    for row in read_rows(Path(file), names):
        truth = (row.get("reward_model") or {}).get("ground_truth")
        yield {"data_source": row["data_source"], "ground_truth": truth, "extra_info": extra_info_of(row)}


def _try(function: Callable, row: dict, settings: dict, numbers: Sequence[RewardField]) -> None:
    """Check that a reward function scores a short response to a row, and returns these numbers in its dictionary. It is
    called as in the run: in an event loop, or in a thread of one, where `signal.alarm` does not work."""
    leave_out = "trainer.try_reward=false leaves this trial out"
    call = partial(function, solution_str="1", **row, **settings)
    try:
        with patch.object(signal, "signal", wraps=signal.signal) as set_handler:  # its error may be caught
            result = result_in_thread(call() if inspect.iscoroutinefunction(function) else asyncio.to_thread(call))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, which would end the command with exit code 0
        raise ValueError(f"{REWARD} fails with it: {type(error).__name__}: {error}; {leave_out}") from error
    if set_handler.called:
        raise ValueError(
            f"{REWARD} sets a handler of {signal.Signals(set_handler.call_args[0][0]).name}, which fails outside the "
            f"main thread, so that each response may get {result!r}: leave out its own time limit; {leave_out}"
        )
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError(f"{REWARD} returns a coroutine, and nobody awaits it: name an `async def` function")
    is_dict = isinstance(result, dict)
    try:
        finite_number(result.get("score") if is_dict else result, "the score")
    except ValueError:
        message = f"{REWARD} returns {result!r}, expected a finite number, or a dictionary with score"
        raise ValueError(message) from None
    for number in numbers:
        if number.name not in (result if is_dict else ("acc",)):
            raise ValueError(
                f"{REWARD} returns {result!r}, but {number.needed_by} also needs {number.name}; {leave_out}"
            )
