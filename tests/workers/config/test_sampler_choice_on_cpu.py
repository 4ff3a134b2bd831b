"""Runs name HAPO's logits processor where they need it. test_model_runner_on_cpu.py asks vLLM about its runners."""

import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.trainer.checks.run_plan import describe_plan
from verl.workers.config import sampler_choice
from verl.workers.config.sampler_choice import PROCESSORS, choose_sampler, describe_sampler, listed_architectures
from vllm_patches.tempered_requests import PROCESSOR

LLAMA, QWEN = {"architectures": ["LlamaForCausalLM"]}, {"architectures": ["Qwen2ForCausalLM"]}
WITH_LIST = "A = 1\nDEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset(\n    {'LlamaForCausalLM', 'Other'}\n)\n"
WITHOUT_LIST = "A = 1\n"


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a vLLM with this text of config/vllm.py the installed one."""
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(sampler_choice, "installed_vllm", lambda: tmp_path)

    def write(text: str):
        (tmp_path / "config").mkdir(exist_ok=True)
        (tmp_path / "config/vllm.py").write_text(text)
        return tmp_path

    return write


def chosen(*overrides, model=LLAMA, recipe="sampler=tempered", hardware="gpu"):
    """Return the logits processors of a run, and the text of its plan about the sampler."""
    config = composed("explore", f"hardware={hardware}", recipe, *overrides)
    choose_sampler(config, model)
    return list(OmegaConf.select(config, PROCESSORS) or []), describe_sampler(config)


@pytest.mark.parametrize(
    ("source", "model", "processors"),
    [
        (WITHOUT_LIST, LLAMA, []),
        (WITHOUT_LIST, QWEN, []),
        (WITHOUT_LIST, None, []),
        (WITH_LIST, LLAMA, []),
        (WITH_LIST, QWEN, [PROCESSOR]),
        (WITH_LIST, None, [PROCESSOR]),
    ],
)
def test_gpu_runs_name_the_processor_where_the_model_has_the_v1_runner(install, source, model, processors):
    install(source)
    named, text = chosen(model=model)
    way = "V1 runner, by a logits processor" if processors else "V2 runner, by its sampler"
    assert named == processors and text.startswith(f"adaptive temperature (tau 0.05) on vLLM's {way}")


@pytest.mark.parametrize(("forced", "model", "processors"), [("0", LLAMA, [PROCESSOR]), ("1", QWEN, [])])
def test_cpus_other_processors_and_vllms_own_variable_decide_whatever_the_model(
    install, monkeypatch, forced, model, processors
):
    install(WITHOUT_LIST)
    assert chosen(hardware="cpu")[0] == [PROCESSOR]
    assert chosen(f"+{PROCESSORS}=[mine]")[0] == ["mine", PROCESSOR]
    assert chosen(f"+{PROCESSORS}=['{PROCESSOR}']")[0] == [PROCESSOR]
    install(WITH_LIST)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", forced)
    assert chosen(model=model)[0] == processors


def test_an_ordinary_temperature_needs_none(install):
    install(WITH_LIST)
    processors, text = chosen(recipe="sampler=plain", model=QWEN)
    assert processors == [] and text.startswith("temperature 1.0")
    assert "\nsampler:  temperature 1.0" in describe_plan(composed("explore", "hardware=cpu"))


def test_a_list_of_another_form_is_noticed(install):
    with pytest.raises(ValueError):
        listed_architectures(install("DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = made_elsewhere()\n"))
