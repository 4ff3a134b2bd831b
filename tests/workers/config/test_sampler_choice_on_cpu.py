"""Runs name HAPO's logits processor where they need it. test_model_runner_on_cpu.py asks vLLM about its runners.

The last test here asks vLLM's own property, without an engine.
"""

import asyncio
import json
from types import SimpleNamespace

import huggingface_hub
import pytest
from omegaconf import OmegaConf

from tests.configs import composed
from verl.trainer.checks.run_dir import check_same_method, prepare_run_dir
from verl.trainer.checks.run_plan import describe_plan
from verl.trainer.checks.settle import settle_sampler
from verl.workers.config import sampler_choice
from verl.workers.config.sampler_choice import (
    ENGINE,
    PROCESSORS,
    SEEDS,
    bound_scores,
    choose_sampler,
    choose_seeds,
    describe_sampler,
    listed_architectures,
    takes_v2_runner,
)
from verl.workers.rollout.engines.interface import GenerationRequest
from verl.workers.rollout.engines.vllm_server import LLMClientEngine
from vllm_patches import cpu_version_name
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


@pytest.mark.parametrize("source", [WITH_LIST, WITHOUT_LIST])
@pytest.mark.parametrize("model", [LLAMA, QWEN, None])
def test_gpu_runs_name_the_processor_where_the_model_has_the_v1_runner(install, source, model):
    install(source)
    processors = [PROCESSOR] if source == WITH_LIST and model != LLAMA else []
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


def test_the_config_of_a_hub_model_is_fetched_before_the_choice(install, monkeypatch, tmp_path):
    """The first run of a model, which no cache has, chooses as its resume does."""
    install(WITH_LIST)
    file = tmp_path / "config.json"

    def download(name, filename):
        file.write_text(json.dumps(LLAMA | {"text_config": {"architectures": None}}))

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_: str(file) if file.exists() else None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    config = composed("explore", "hardware=gpu", "sampler=tempered", "actor_rollout_ref.model.path=some/llama")
    settle_sampler(config)
    assert OmegaConf.select(config, PROCESSORS) is None and OmegaConf.select(config, sampler_choice.SEEDS)

    def no_network(name, filename):
        raise ConnectionError("no network")

    file.unlink()
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", no_network)
    with pytest.raises(ValueError, match=r"model.path=some/llama: its config.json cannot be downloaded"):
        settle_sampler(config)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    settle_sampler(config)
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VLLM_USE_V2_MODEL_RUNNER == "1"


def test_the_v1_runner_scores_few_tokens_at_once(install):
    install(WITH_LIST)
    for model, bound in ((QWEN, 1024), (LLAMA, None)):
        for credit, expected in (("credit=igpo", bound), ("credit=grpo", None)):
            config = composed("explore", "hardware=gpu", credit, "actor_rollout_ref.rollout.max_model_len=4096")
            bound_scores(config, model)
            assert OmegaConf.select(config, f"{ENGINE}.long_prefill_token_threshold") == expected


def test_a_run_resumes_with_the_runner_that_it_began_with(install, tmp_path):
    for source in (WITH_LIST, WITHOUT_LIST):
        install(source)
        config = composed("explore", "hardware=gpu", "sampler=tempered", f"trainer.default_local_dir={tmp_path}/run")
        choose_sampler(config, QWEN)
        if source == WITH_LIST:
            prepare_run_dir(config)
            (tmp_path / "run/global_step_1/actor").mkdir(parents=True)
            (tmp_path / "run/global_step_1/COMPLETE").touch()
            check_same_method(config)
    with pytest.raises(ValueError, match="vllm_runner=V1, which this one with V2 would resume"):
        check_same_method(config)


class Engine:
    """What vLLM's property reads: `sections` of an engine's config, with the defaults of a Llama on GPUs."""

    def __init__(self, options: dict):
        none = ("speculative_config", "ec_transfer_config", "hisparse_config", "diffusion_config")
        flags = ("enable_return_routed_experts", "enable_prompt_embeds", "has_inner_state", "is_diffusion")
        flags += ("enable_dbo", "use_ubatching", "enable_elastic_ep", "kv_sharing_fast_prefill", "enable_sp")
        keys = dict.fromkeys((*none, "logits_processors")) | dict.fromkeys(flags, False) | {"runner_type": "generate"}
        keys |= {"architectures": LLAMA["architectures"], "logprobs_mode": "raw_logprobs", "mamba_cache_mode": "none"}
        keys |= dict.fromkeys((f"{of}_parallel_size" for of in ("prefill_context", "tensor", "pipeline")), 1)
        keys |= {"distributed_executor_backend": "mp", "mode": 3, "pass_config": SimpleNamespace(enable_sp=False)}
        for key, value in options.items():
            section, _, name = key.rpartition(".")
            if section == "speculative_config":
                asked = dict.fromkeys(("uses_dynamic_speculative_decoding", "use_dspark"), lambda: False)
                value, name = SimpleNamespace(method=value, parallel_drafting=False, **asked), section
            keys[name] = value
        section = SimpleNamespace(**keys)
        self.speculative_config, self.ec_transfer_config = keys["speculative_config"], keys["ec_transfer_config"]
        for name in ("model", "cache", "parallel", "compilation", "attention"):
            setattr(self, f"{name}_config", section)


FLAGS = ("enable_elastic_ep", "enable_dbo", "enable_prompt_embeds", "enable_return_routed_experts")
CASES = [{}, {"logits_processors": ["mine"]}, {"compilation_config.mode": 1}, {"mamba_cache_mode": "all"}]
CASES += [{flag: True} for flag in (*FLAGS, "kv_sharing_fast_prefill")]
CASES += [{"logprobs_mode": mode} for mode in ("raw_logits", "processed_logits", "processed_logprobs")]
CASES += [
    {"speculative_config.method": of} for of in ("ngram", "ngram_gpu", "draft_model", "suffix", "medusa", "eagle")
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_choice_is_that_of_the_installed_vllm(options, monkeypatch):
    cpu_version_name.install()
    from vllm.config import vllm as module

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setattr(module, "HAS_TRITON", True)
    for name in ("_get_v2_model_runner_unsupported_features", "_is_default_v2_model_runner_model"):
        if hasattr(module.VllmConfig, name):
            monkeypatch.setattr(Engine, name, getattr(module.VllmConfig, name), raising=False)
    config = composed("explore", "hardware=gpu")
    for key, value in options.items():
        OmegaConf.update(config, f"{ENGINE}.{key}", value, force_add=True)
    typed = {key: module.CompilationMode(1) if key.startswith("compilation") else of for key, of in options.items()}
    assert takes_v2_runner(config, LLAMA) == module.VllmConfig.use_v2_model_runner.fget(Engine(typed))


# ---- seeds: where they make runs reproducible, or cost nothing ----


def seeds(monkeypatch, recipe, *overrides, v2=False):
    monkeypatch.setattr(sampler_choice, "takes_v2_runner", lambda config, model: v2)
    config = composed(recipe, *overrides)
    choose_sampler(config, QWEN)
    choose_seeds(config, QWEN)
    sent = OmegaConf.select(config, SEEDS)
    assert describe_sampler(config).endswith("a seed for each request" if sent else "no seeds")
    return sent


@pytest.mark.parametrize("recipe", ["grpo_trainer", "explore"])
def test_where_requests_carry_seeds(monkeypatch, recipe):
    assert seeds(monkeypatch, recipe, "hardware=cpu")
    assert not seeds(monkeypatch, recipe, "hardware=gpu")
    assert seeds(monkeypatch, recipe, "hardware=gpu", v2=True)
    tempered = ["explore", "hardware=gpu", "sampler=tempered"]
    assert seeds(monkeypatch, *tempered, v2=True) and not seeds(monkeypatch, *tempered)
    assert seeds(monkeypatch, recipe, "hardware=gpu", f"+{SEEDS}=true")
    assert seeds(monkeypatch, recipe, "hardware=gpu", "actor_rollout_ref.rollout.full_determinism=true")


@pytest.mark.parametrize("sent", [False, True])
def test_the_engine_sends_them_or_not(sent):
    asked = []

    async def generate(group, prompt_ids, params):
        asked.append(params)
        return SimpleNamespace(token_ids=[1, 2], log_probs=[-1.0, -1.0], stop_reason="completed", extra_fields={})

    engine = LLMClientEngine(SimpleNamespace(), seeds=sent)
    engine.servers = SimpleNamespace(send=generate, release=lambda group: None)
    asyncio.run(engine.generate(GenerationRequest([5], max_tokens=2, stop_token_ids=[9], seed=7)))
    assert [params.get("seed") for params in asked] == ([7] if sent else [None])
