"""Tests of the checks of a config: refused.txt lists what they refuse, with the message, and what they let pass."""

import re
import shlex

import pytest
from omegaconf import OmegaConf

from recipe.common.tiny_model import write_tiny_model
from tests.configs import composed
from tests.trainer.checks.refused import ROWS
from verl.trainer.checks.model.lora import check_lora, settle_lora
from verl.trainer.checks.parts import check_parts, check_typed_sections
from verl.trainer.checks.preflight import check_engines, check_micro_batches_and_servers, check_overlong_buffer
from verl.trainer.checks.prompts import load_tokenizer
from verl.trainer.checks.rows import check_prompt_lengths
from verl.trainer.checks.settle import settle
from verl.trainer.checks.trackers import check_trackers
from verl.trainer.checks.values import check_registered, check_root_keys
from verl.workers.config.schedule import settle_schedule
from verl.workers.rollout.run_environment import environment_of


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("refused") / "model")


def check(kind: str, config, model) -> None:
    OmegaConf.set_struct(config, False)
    if kind == "parts":
        settle_schedule(config)
        check_parts(config)
    elif kind == "names":
        config.actor_rollout_ref.model.path = str(model)
        settle(config)
    elif kind == "keys":
        config.actor_rollout_ref.model.path = str(model)
        check_root_keys(config)
        settle(config)
        for each in (check_typed_sections, check_registered, check_micro_batches_and_servers):
            each(config)
    elif kind == "settings":
        config.actor_rollout_ref.model.path = str(model)
        settle(config)
        for each in (check_engines, check_prompt_lengths, check_overlong_buffer):
            each(config)
    elif kind == "chat":
        config.actor_rollout_ref.model.path = str(model)
        check_typed_sections(config)
        environment_of(config, load_tokenizer(config))
    elif kind == "lora":
        settle_lora(config)
        check_lora(config)
    else:
        check_trackers(config)


@pytest.mark.parametrize(("kind", "overrides", "message"), [row for row in ROWS if row[0] != "run"])
def test_a_config_is_refused_with_its_message_or_passes(model, kind, overrides, message):
    config = composed("explore", "hardware=cpu", *shlex.split(overrides))
    if not message:
        check(kind, config, model)
        return
    with pytest.raises(ValueError) as error:
        check(kind, config, model)
    assert re.search(".*".join(map(re.escape, message.split("…"))), str(error.value), re.DOTALL)
