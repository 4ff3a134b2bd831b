"""The run's chat template renders one row of each file before the run starts, and enough rows fit."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from recipe.common.tiny_model import write_tiny_model
from tests.configs import composed
from tests.workers.rollout.tools.mcp import mcp_library
from verl.trainer.checks.prompts import check_prompts, load_tokenizer, turn_end_warning
from verl.workers.rollout.tree_rollout import environment_of


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def config(tmp_path, tiny):
    """A run with a model of its own and rows of 3 to 10 numbers, one token each."""
    shutil.copytree(tiny, tmp_path / "model")
    rows = [{"prompt": [{"role": "user", "content": "1" * (3 + row % 8)}]} for row in range(64)]
    pd.DataFrame(rows).to_parquet(tmp_path / "rows.parquet")
    config = composed("grpo_trainer", "hardware=cpu", f"actor_rollout_ref.model.path={tmp_path}/model")
    OmegaConf.set_struct(config, False)
    files = {"train_files": f"{tmp_path}/rows.parquet", "val_files": [f"{tmp_path}/rows.parquet"]}
    sizes = {"train_batch_size": 16, "max_prompt_length": 20, "filter_overlong_prompts": True}
    return OmegaConf.merge(config, {"data": files | sizes})


def with_template(config, template: str):
    (Path(config.actor_rollout_ref.model.path) / "chat_template.jinja").write_text(template)
    return config


def without_template(config) -> Path:
    folder = Path(config.actor_rollout_ref.model.path)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def test_a_template_that_raises_names_file_and_row(config):
    check_prompts(config)
    raising = "{{ raise_exception('Only system messages are supported') }}"
    with pytest.raises(ValueError, match="data.train_files: .*rows.parquet: row 0: the chat template .*Only system"):
        check_prompts(with_template(config, raising))


def test_a_model_without_template_or_tokenizer_is_named(config):
    folder = without_template(config)
    with pytest.raises(
        ValueError, match="actor_rollout_ref.model.path=.* has no chat template, .*custom_chat_template"
    ):
        check_prompts(config)
    (folder / "preprocessor_config.json").write_text("{}")
    check_prompts(config)  # the model's processor may have it
    (folder / "preprocessor_config.json").unlink()
    config.actor_rollout_ref.model.custom_chat_template = "{{ messages[0]['content'] }}"
    check_prompts(config)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="actor_rollout_ref.model.path=.* has no tokenizer"):
        check_prompts(config)


def test_a_tokenizer_of_another_model_is_named(config):
    file = Path(config.actor_rollout_ref.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"vocab_size": 200}))
    with pytest.raises(ValueError, match="rows.parquet: row 0: .*is not in the model's vocabulary of 200"):
        check_prompts(config)


def test_rows_left_by_the_length_filter_are_counted_against_the_batch(config):
    """Each length from 3 to 10 tokens has 8 of the 64 rows; this template adds no tokens."""
    with_template(config, "{{ messages[0]['content'] }}")
    config.data.max_prompt_length = 4
    check_prompts(config)  # 16 rows have at most 4 tokens
    config.data.max_prompt_length = 3
    with pytest.raises(ValueError, match=r"data.train_files: 8 of 64 prompts .*max_prompt_length=3 .* 16 are needed"):
        check_prompts(config)
    config.data.max_prompt_length = 2
    config.data.train_batch_size = 0
    with pytest.raises(ValueError, match=r"data.val_files: 0 of 64 prompts"):
        check_prompts(config)


def test_rows_that_cannot_be_counted_are_not_too_long(config, tmp_path):
    """Pictures, of which only the model's processor knows the tokens, and rows that are not on this machine."""
    with_template(config, "{{ messages[0]['content'] }}")
    config.data.max_prompt_length = 2
    for change in ({"train_files": ["s3://rows/a.parquet", f"{tmp_path}/rows.parquet"]}, {"custom_cls": {"path": "x"}}):
        check_prompts(OmegaConf.merge(config, {"data": change | {"val_files": []}}))
    parts = [{"prompt": [{"role": "user", "content": [{"type": "image", "text": ""}]}]} for _ in range(64)]
    pd.DataFrame(parts).to_parquet(tmp_path / "rows.parquet")
    check_prompts(config)


@pytest.fixture
def chat(config):
    """A run in `environment=chat`, whose template writes the names of the tools, and then the messages."""
    model = config.actor_rollout_ref.model.path
    run = composed("explore", "hardware=cpu", "tree=plain", "environment=chat", f"actor_rollout_ref.model.path={model}")
    OmegaConf.set_struct(run, False)
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    with_template(run, names + "{% for message in messages %}{{ message.content }}{% endfor %}")
    return OmegaConf.merge(run, {"data": config.data})


def test_lengths_count_the_tools_of_a_chat(chat):
    """The tool is named python, which has six tokens; prompts have 3 to 10. Upstream's filter leaves the tool out."""
    chat.data.max_prompt_length = 17
    check_prompts(chat)
    chat.data.max_prompt_length = 16
    with pytest.raises(ValueError, match=r"data.train_files: \d+ prompts do not fit .*=16 .*set it to more than 16"):
        check_prompts(chat)


def test_a_chat_with_a_model_of_more_than_text_is_refused_by_its_type(chat):
    file = Path(chat.actor_rollout_ref.model.path) / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "qwen2_5_vl"}))
    with pytest.raises(ValueError, match="environment=chat cannot build the prompts of model_type=qwen2_5_vl: .*VL"):
        check_prompts(chat)


def test_an_end_of_turn_at_which_no_engine_stops_is_warned_of(config):
    assert not turn_end_warning(config)
    for end, warns in (("{{ eos_token }}", False), ("", False), ("1", True)):
        turn = "{% for message in messages %}{{ message['content'] }}{% if message['role'] == 'assistant' %}"
        warning = turn_end_warning(with_template(config, f"{turn}{end}{{% endif %}}{{% endfor %}}"))
        assert ("ends a turn with '1', and the engine stops at" in warning) == warns


def test_rows_that_are_too_long_only_with_the_descriptions_of_tools_are_found(config):
    """The longest 8 of the 64 rows have 10 numbers."""
    tools = composed("explore", "hardware=cpu", "tree=plain", "environment=chat")
    model = {"model": config.actor_rollout_ref.model}
    config = OmegaConf.merge(tools, {"data": config.data, "actor_rollout_ref": model})
    OmegaConf.set_struct(config, False)
    params = {"command": [sys.executable, mcp_library.__file__], "tools": ["add"]}
    entry = {"class_path": "verl.workers.rollout.tools.mcp.tool.MCPTool", "params": params}
    config.actor_rollout_ref.rollout.tools.merge_with({"tool_instances": {"python": None, "m": entry}})
    tokenizer = load_tokenizer(config)
    environment = environment_of(config, tokenizer)
    asyncio.run(environment.stop())
    longest, options = [{"role": "user", "content": "1" * 10}], {"tools": environment.schemas, "return_dict": False}
    n = len(tokenizer.apply_chat_template(longest, add_generation_prompt=True, **options))

    config.data.max_prompt_length = n + 1
    check_prompts(config)
    config.data.max_prompt_length = n
    message = rf"data.train_files: 8 prompts do not fit .*={n} with .* to more than {n}, "
    for filters in (True, False):
        config.data.filter_overlong_prompts = filters
        with pytest.raises(ValueError, match=message):
            check_prompts(config)
