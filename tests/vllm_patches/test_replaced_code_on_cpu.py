"""The code of vLLM that the CPU patches replace; the other patches' tests call vLLM's own code beside ours."""

import pytest

from tests.verl_patches.upstream import check_code

RELOAD, SEEDS, TEXT = "cpu_weight_reload", "cpu_seeded_requests", "top_logprobs_without_text"
ADAPTER = "cpu_adapter_names"
LAYERS, V1 = "vllm.model_executor.layers", "vllm.v1"


@pytest.mark.parametrize(
    ("patch", "module", "name", "code"),
    [
        (RELOAD, f"{LAYERS}.utils", "dispatch_cpu_unquantized_gemm", "remove_weight"),
        (RELOAD, f"{LAYERS}.linear", "UnquantizedLinearMethod", "import dispatch_cpu_unquantized_gemm"),
        (SEEDS, f"{V1}.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync", "gen.set_offset(gen.get_offset()"),
        (
            SEEDS,
            f"{V1}.sample.ops.topk_topp_sampler",
            "TopKTopPSampler.forward_cpu",
            "generators: dict[int, torch.Generator]",
        ),
        (ADAPTER, "vllm.model_executor.models.utils", "WeightsMapper.get_rename_mapper", "orig_to_new_stacked={}"),
        (ADAPTER, "verl.utils.vllm.utils", "VLLMHijack.hijack", "hf_to_vllm_mapper.get_unstacked_mapper()"),
        (TEXT, f"{V1}.engine.logprobs", "LogprobsProcessor.from_new_request", "tokenizer"),
        *((TEXT, "vllm.logprobs", "FlatLogprobs", f"{name}: list[") for name in ("start_indices", "end_indices")),
        *((TEXT, "vllm.logprobs", "FlatLogprobs", f"{name}: list[") for name in ("token_ids", "logprobs")),
    ],
)
def test_vllm_still_has_the_code(patch, module, name, code):
    check_code(f"vllm_patches/{patch}.py", module, name, code)
