"""The code of vLLM that the CPU patches replace; the other patches' tests call vLLM's own code beside ours."""

from tests.verl_patches.upstream import check_code


def test_vllm_still_packs_linear_weights():
    patch, module = "vllm_patches/cpu_weight_reload.py", "vllm.model_executor.layers.utils"
    check_code(patch, module, "dispatch_cpu_unquantized_gemm", "remove_weight")


def test_vllm_still_looks_up_the_packing_function_when_it_packs():
    patch, module = "vllm_patches/cpu_weight_reload.py", "vllm.model_executor.layers.linear"
    check_code(patch, module, "UnquantizedLinearMethod", "import dispatch_cpu_unquantized_gemm")


def test_vllm_still_sets_generators_back_by_an_offset():
    patch, module = "vllm_patches/cpu_seeded_requests.py", "vllm.v1.worker.gpu_model_runner"
    check_code(patch, module, "GPUModelRunner._bookkeeping_sync", "gen.set_offset(gen.get_offset()")


def test_vllms_cpu_sampler_still_takes_generators():
    patch, module = "vllm_patches/cpu_seeded_requests.py", "vllm.v1.sample.ops.topk_topp_sampler"
    check_code(patch, module, "TopKTopPSampler.forward_cpu", "generators: dict[int, torch.Generator]")


def test_vllm_still_makes_log_probability_processors_from_requests():
    patch, module = "vllm_patches/top_logprobs_without_text.py", "vllm.v1.engine.logprobs"
    check_code(patch, module, "LogprobsProcessor.from_new_request", "tokenizer")
    for column in ("start_indices", "end_indices", "token_ids", "logprobs"):
        check_code(patch, "vllm.logprobs", "FlatLogprobs", f"{column}: list[")
