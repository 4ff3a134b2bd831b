"""The code of verl and vLLM that ours replaces, wraps, overrides or relies on is the one for which ours was written.

relied_on.txt holds digests of verl's, of which one version is supported; of vLLM's, of which several are, a line of
code is named here. The code is read from the installed files, because imported modules are patched already.
"""

import ast
import hashlib
from importlib.util import find_spec
from pathlib import Path

import pytest

RELIED_ON = [
    line.split() for line in Path(__file__).with_name("relied_on.txt").read_text().splitlines() if line[0] != "#"
]
RELOAD, SEEDS = "vllm_patches/cpu_weight_reload.py", "vllm_patches/cpu_seeded_requests.py"
ADAPTER, TEXT = "vllm_patches/cpu_adapter_names.py", "vllm_patches/top_logprobs_without_text.py"
TEMPERATURE, CHOICE = "vllm_patches/v1_adaptive_temperature.py", "VllmConfig._get_v2_model_runner_unsupported_features"
LAYERS, SAMPLER = "vllm.model_executor.layers", "vllm.v1.sample.ops.topk_topp_sampler"
LINES = [
    ("verl_patches/engine_deaths.py", "vllm.v1.engine.utils", "CoreEngineProcManager", 'else "EngineCore"'),
    (RELOAD, f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm", "remove_weight"),
    (RELOAD, f"{LAYERS}.linear", "UnquantizedLinearMethod", "import dispatch_cpu_unquantized_gemm"),
    (SEEDS, "vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync", "gen.set_offset(gen.get_offset()"),
    (SEEDS, SAMPLER, "TopKTopPSampler.forward_cpu", "generators: dict[int, torch.Generator]"),
    (ADAPTER, "vllm.model_executor.models.utils", "WeightsMapper.get_rename_mapper", "orig_to_new_stacked={}"),
    (ADAPTER, "verl.utils.vllm.utils", "VLLMHijack.hijack", "hf_to_vllm_mapper.get_unstacked_mapper()"),
    (TEMPERATURE, "vllm.config.vllm", CHOICE, "model_config.logits_processors or has_logitsproc_plugins"),
    (TEMPERATURE, "vllm.config.vllm", CHOICE, 'append("custom logits processors")'),
    (TEMPERATURE, "vllm.config.vllm", "VllmConfig.use_v2_model_runner", f"self.{CHOICE.partition('.')[2]}()"),
    (TEMPERATURE, "vllm.sampling_params", "SamplingParams.verify", "self._validate_logits_processors(model_config)"),
    (TEXT, "vllm.v1.engine.logprobs", "LogprobsProcessor.from_new_request", "tokenizer"),
    *((TEXT, "vllm.logprobs", "FlatLogprobs", f"{name}: list[") for name in ("start_indices", "end_indices")),
    *((TEXT, "vllm.logprobs", "FlatLogprobs", f"{name}: list[") for name in ("token_ids", "logprobs")),
]


def definition(ours: str, module: str, name: str) -> str:
    """Return the source of a class, function or method (`Class.method`) of a module."""
    package, *path = module.split(".")
    file = Path(find_spec(package).submodule_search_locations[0], *path).with_suffix(".py")
    assert file.exists(), f"{ours} needs {module}, which is gone: adapt it or remove it"
    text = file.read_text()
    node = ast.parse(text)
    for part in name.split("."):
        node = next((child for child in node.body if getattr(child, "name", None) == part), None)
        assert node is not None, f"{ours} needs {module}.{name}, which is gone: adapt it or remove it"
    return ast.get_source_segment(text, node)


@pytest.mark.parametrize(("ours", "module", "name", "digest"), RELIED_ON)
def test_a_definition_has_not_changed(ours, module, name, digest):
    digest_now = hashlib.sha256(definition(ours, module, name).encode()).hexdigest()[:12]
    assert digest_now == digest, (
        f"{module}.{name} has changed, on which {ours} relies: compare the two, adapt ours or remove it, "
        f"and write {digest_now} into relied_on.txt"
    )


@pytest.mark.parametrize(("ours", "module", "name", "code"), LINES)
def test_a_definition_still_has_the_code(ours, module, name, code):
    assert code in definition(ours, module, name), (
        f"{module}.{name} no longer contains {code!r}, on which {ours} relies: adapt it or remove it"
    )
