"""A run's memory against a real model's tensors, measured allocations and sums by hand; GPU run scripts fit 80 GB."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from peft import LoraConfig, get_peft_model
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.torch_functional import entropy_from_logits_with_chunking

from tests.configs import composed
from tests.recipe.test_run_scripts_on_cpu import SCRIPTS
from tests.tables import table
from tests.trainer.checks.model.models import PUBLISHED, TINY, decoder, model
from verl.trainer.checks.resources.memory_plan import (
    CONTEXTS,
    SERVER_WORKSPACE,
    describe_memory,
    logits_bytes,
    model_shape,
    plan_memory,
)
from verl.trainer.checks.run_plan import describe_plan

ROOT = Path(__file__).resolve().parents[4]
GPU_SCRIPTS = [script for script in SCRIPTS if not script.endswith("_cpu.sh")]
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
FSDP = f"{ACTOR}.fsdp_config"
SETTINGS = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.entropy_from_logits_with_chunking": False,
    f"{FSDP}.use_torch_compile": True,
    f"{FSDP}.param_offload": False,
    f"{FSDP}.optimizer_offload": False,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 0.7,
}


def config_with(*overrides: str):
    """Compose a config with the settings that the sums by hand assume."""
    return composed("grpo_trainer", "hardware=gpu", *(f"{key}={value}" for key, value in SETTINGS.items()), *overrides)


def tensor_bytes(tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_states_and_cache_are_those_of_a_real_model_after_a_real_step(tied):
    hf_config = decoder(*TINY, tied)
    trained = AutoModelForCausalLM.from_config(hf_config).float()
    optimizer = torch.optim.AdamW(trained.parameters())
    output = trained(input_ids=torch.arange(7)[None], use_cache=True)
    output.logits.sum().backward()
    optimizer.step()
    plan = plan_memory(config_with("trainer.n_gpus_per_node=1"), hf_config)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert plan.parameters * 1e9 == pytest.approx(tensor_bytes(trained.parameters()))
    assert plan.gradients * 1e9 == pytest.approx(tensor_bytes(p.grad for p in trained.parameters()))
    assert plan.optimizer * 1e9 == pytest.approx(tensor_bytes(moments))
    assert plan.weights * 1e9 == pytest.approx(tensor_bytes(trained.bfloat16().parameters()))
    cache = tensor_bytes(
        part.bfloat16() for layer in output.past_key_values.layers for part in (layer.keys, layer.values)
    )
    assert plan.kv_tokens == pytest.approx(plan.kv_cache * 1e9 / (cache / 7), abs=1)


@pytest.mark.parametrize("modules", ["all-linear", "[q_proj,down_proj]"])
def test_with_lora_only_the_factors_have_gradients_and_states(modules):
    hf_config = decoder(*TINY)
    names = modules if modules == "all-linear" else modules[1:-1].split(",")
    base = AutoModelForCausalLM.from_config(hf_config).float()
    frozen = tensor_bytes(base.parameters())
    trained = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=names))
    optimizer = torch.optim.AdamW(trained.parameters())
    trained(input_ids=torch.arange(7)[None]).logits.sum().backward()
    optimizer.step()
    factors = tensor_bytes(p for p in trained.parameters() if p.requires_grad)
    lora = ("trainer.n_gpus_per_node=1", f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules={modules}")
    plan = plan_memory(config_with(*lora), hf_config)
    moments = [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert plan.parameters * 1e9 == pytest.approx(frozen + factors)
    assert plan.gradients * 1e9 == pytest.approx(
        tensor_bytes(p.grad for p in trained.parameters() if p.grad is not None)
    )
    assert plan.optimizer * 1e9 == pytest.approx(tensor_bytes(moments))
    assert plan.weights * 1e9 == pytest.approx((frozen + factors) / 2), "vLLM's are bfloat16"
    merged = plan_memory(config_with(*lora, f"{MODEL}.lora.merge=true"), hf_config)
    assert merged.weights * 1e9 == pytest.approx(frozen / 2)


def test_servers_that_sleep_with_an_adapter_keep_a_copy_of_the_weights():
    """Qwen2.5-7B's 15.23 GB of weights, and at most 0.16 GB of factors, for each of 8 servers."""
    lora = config_with(f"{MODEL}.lora_rank=32")
    assert "host:     123 GB a node: sleeping servers keep" in describe_memory(lora, model("Qwen2.5-7B"))
    for without in (f"{MODEL}.lora.merge=true", f"{MODEL}.lora_rank=0", f"{ROLLOUT}.free_cache_engine=false"):
        assert "host:" not in describe_memory(config_with(f"{MODEL}.lora_rank=32", without), model("Qwen2.5-7B"))


def test_memory_on_a_gpu_by_hand():
    """Sum Qwen2.5-7B's 7,615,616,512 parameters in fp32 over 8 GPUs: 3.808 GB each, and twice that for Adam."""
    plan = plan_memory(config_with(), model("Qwen2.5-7B"))
    assert (plan.parameters, plan.gradients, plan.optimizer) == pytest.approx((3.808, 3.808, 7.616), rel=1e-3)
    # 16,384 tokens of 152,064 logits of 2 bytes, and 4 for the entropies
    assert plan.logits == pytest.approx(14.948, rel=1e-3)
    # 28 hidden states of 3,584 numbers for each token, of 2 bytes
    assert plan.activations == pytest.approx(3.288, rel=1e-3)
    assert plan.training == pytest.approx(15.231 + 3.288 + 14.948 + CONTEXTS, rel=1e-3)
    assert plan.rollout == pytest.approx(56 + 3.808 + 7.616 + CONTEXTS, rel=1e-3)
    # 56 - 15.231 GB of weights - the workspace, in tokens of 57,344 bytes
    assert plan.kv_tokens == pytest.approx((56 - 15.231233 - SERVER_WORKSPACE) * 1e9 / 57_344, rel=1e-5)
    two = plan_memory(config_with(f"{ROLLOUT}.tensor_model_parallel_size=2"), model("Qwen2.5-7B"))
    assert two.weights == pytest.approx(7.6156, rel=1e-3)
    assert two.kv_tokens == pytest.approx((56 - 7.615617 - SERVER_WORKSPACE) * 1e9 / 28_672, rel=1e-5)


@pytest.mark.parametrize(("overrides", "training", "rollout"), table(__file__, "moved memory"))
def test_settings_move_memory(overrides, training, rollout):
    """Compare with the plan of the settings above, in GB: 11.423 are the parameters and Adam's states of a GPU."""
    before, after = (plan_memory(config_with(*keys), model("Qwen2.5-7B")) for keys in ((), overrides))
    assert after.training - before.training == pytest.approx(training, abs=2e-3)
    assert after.rollout - before.rollout == pytest.approx(rollout, abs=2e-3)


def peak_bytes(function) -> int:
    """Return the most that is allocated at once while `function` runs, without the matrices that oneDNN reorders."""
    with (
        torch.backends.mkldnn.flags(enabled=False),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler,
    ):
        function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return peak


class CrossEntropy(torch.autograd.Function):
    """A loss that, as flash-attn's, needs no matrix but the logits and their gradient."""

    @staticmethod
    def forward(ctx, logits):
        ctx.save_for_backward(logits)
        return logits[:, 0].float()

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty_like(ctx.saved_tensors[0]).copy_(gradient[:, None])


def whole_entropy(logits, chunk_size):
    """Compute upstream's `entropy_from_logits` with the casts to fp32 that autocast makes on CUDA only."""
    probabilities = torch.softmax(logits.float(), -1)
    return torch.logsumexp(logits.float(), -1) - torch.sum(probabilities * logits, -1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("in_loss", [False, True])
@pytest.mark.parametrize("entropy", [whole_entropy, entropy_from_logits_with_chunking])
def test_logits_and_entropies_against_measured_allocations(temperature, in_loss, entropy):
    """Allocate in the order of upstream's forward step, and of the backward pass if the loss has an entropy."""
    tokens, vocabulary = 512, 8192
    config = config_with(
        f"{ROLLOUT}.temperature={temperature}",
        f"{ACTOR}.entropy_from_logits_with_chunking={entropy is not whole_entropy}",
        f"{ACTOR}.entropy_from_logits_chunk_size=64",
        f"{ACTOR}.calculate_entropy={in_loss}",
        f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}",
        f"{FSDP}.use_torch_compile=false",
    )
    hidden, head = (torch.ones(size, 8, dtype=torch.bfloat16) for size in (tokens, vocabulary))
    hidden.requires_grad_(in_loss)

    def forward():
        raw_logits = hidden @ head.T  # lives until the step returns
        logits = raw_logits if temperature == 1 else raw_logits / torch.full((tokens, 1), temperature).bfloat16()
        entropies = entropy(logits, 64)
        return CrossEntropy.apply(logits).sum() + entropies.sum()

    def step():
        loss = forward()
        if in_loss:
            loss.backward()

    step()
    measured = peak_bytes(step)
    # an entropy in the loss is counted for the largest chunk in any order of gradients
    assert 0.98 * measured <= logits_bytes(config, vocabulary) <= (1.4 if in_loss else 1.02) * measured


def test_a_temperature_that_decays_copies_the_logits():
    sizes = [
        logits_bytes(composed("hato_trainer", "hardware=gpu", *overrides, recipe="hato"), 1)
        for overrides in ((), ("hato.exploration.temperature_decay=0",))
    ]
    config = composed("hato_trainer", "hardware=gpu", recipe="hato").actor_rollout_ref
    assert sizes[0] - sizes[1] == 2 * config.actor.ppo_max_token_len_per_gpu


def test_rows_but_no_limit_of_tokens_are_shared_by_a_sequence_parallel_group():
    """Two GPUs share 5 rows of 1,000 tokens: 2,500 tokens with a bf16 logit and 4 bytes of entropy for each."""
    parallel = (f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{ACTOR}.ppo_max_token_len_per_gpu=9000")
    assert logits_bytes(config_with(*parallel), 1) == 9000 * (2 + 4)
    config = config_with(
        "data.max_prompt_length=100",
        "data.max_response_length=900",
        f"{ACTOR}.ulysses_sequence_parallel_size=2",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
    )
    assert logits_bytes(config, 1) == 2500 * (2 + 4)


@pytest.fixture(scope="module")
def configs(tmp_path_factory) -> dict:
    """Script -> its config: bash with a `python` that writes down what it is asked for, and in which environment."""
    folder = tmp_path_factory.mktemp("scripts")
    python = folder / "bin/python"
    python.parent.mkdir()
    write = '{ printf "%s\\0" "$@" > "$ASKED.argv"; env -0 > "$ASKED.env"; }'
    python.write_text(f'#!/usr/bin/env bash\n[ "$2" != verl.trainer.main_ppo ] || {write}\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("VERL_PLATFORM", "NNODES")}
    env |= {"DRY_RUN": "1", "HARDWARE": "gpu", "PATH": f"{python.parent}:{env['PATH']}", "VIRTUAL_ENV": str(folder)}

    def run(script: str) -> Path:
        own = {"MODEL_PATH": "Qwen/Qwen2.5-0.5B"} if script.startswith("recipe/common") else {}  # of the warm start
        asked = folder / script.replace("/", "_")
        subprocess.run(["bash", script], cwd=ROOT, env=env | own | {"ASKED": str(asked)}, check=True, timeout=60)
        return asked

    def config(asked: Path):
        """Of `python -m verl.trainer.main_ppo --config-dir FOLDER --config-name NAME OVERRIDE...`"""
        arguments, environment = (Path(f"{asked}.{what}").read_text().split("\0")[:-1] for what in ("argv", "env"))
        with mock.patch.dict(os.environ, dict(variable.split("=", 1) for variable in environment)):
            result = composed(*arguments[5:], recipe=Path(arguments[3]).parent.name)
            OmegaConf.resolve(result.trainer)
            return result

    with ThreadPoolExecutor(2) as pool:
        asked = list(pool.map(run, GPU_SCRIPTS))
    return dict(zip(GPU_SCRIPTS, map(config, asked), strict=True))


@pytest.mark.slow
def test_the_papers_numbers_of_nodes(configs):
    nodes = {script: config.trainer.nnodes for script, config in configs.items() if config.trainer.nnodes > 1}
    large = {f"recipe/hapo/run_{name}.sh": 8 for name in ("qwen3_8b", "qwen3_14b")}
    small = ("baseline", "llama3.1_8b_instruct", "llama3.2_3b_instruct", "qwen2.5_math_1.5b", "qwen2.5_math_7b")
    assert nodes == large | {f"recipe/hapo/run_{name}.sh": 4 for name in small}


@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_every_gpu_script_fits_80_gb(configs, script):
    config = configs[script]
    plan = plan_memory(config, model(config.actor_rollout_ref.model.path), gpu=80)
    assert plan.problems() == []
    assert plan.training > CONTEXTS and plan.kv_tokens > 0


def test_the_plan_of_a_gpu_run_shows_its_memory(tmp_path):
    decoder(*TINY).save_pretrained(tmp_path)
    path, more_layers = f"{MODEL}.path={tmp_path}", f"+{MODEL}.override_config.num_hidden_layers=30"
    text = describe_memory(config_with(path))
    assert text in describe_plan(config_with(path)) and "warning" not in text
    assert "memory:" not in describe_plan(composed("grpo_trainer", "hardware=cpu", path))
    # 53 GB of the GPU, in tokens of 3 or 30 layers x 2 heads x 16 x 2 x 2 bytes
    tokens = [
        int(describe_memory(config_with(path, *more)).split(" tokens")[0].split()[-1].replace(",", ""))
        for more in ((), (more_layers,))
    ]
    assert tokens == pytest.approx([53e9 / 384, 53e9 / 3840], rel=1e-3)


def test_a_part_that_does_not_fit_is_a_warning():
    """By hand: 14.77e9 parameters in fp32 with Adam's states are 22.2 GB on each of 8 GPUs, beside 56 of vLLM."""
    text = describe_memory(config_with(), model("Qwen3-14B"))
    assert "rollout:  82.2 GB" in text and "warning:  rollout does not fit" in text and "optimizer_offload" in text
    huge = config_with(
        f"{ACTOR}.ppo_max_token_len_per_gpu=100000",
        f"{ROLLOUT}.max_model_len=40000",
        f"{ROLLOUT}.gpu_memory_utilization=0.42",
    )
    warnings = [line for line in describe_memory(huge, model("Qwen3-14B")).splitlines() if line.startswith("warning:")]
    assert [line.split()[1] for line in warnings] == ["training", "KV"]


def test_memory_that_cannot_be_estimated_is_a_note():
    absent = describe_memory(config_with(f"{MODEL}.path=nobody/has-this-model"))
    unknown = "whether the run fits is unknown, as the config of nobody/has-this-model is not on this machine"
    assert absent == f"memory:   not counted: {unknown}"
    assert "not counted" in describe_memory(config_with(f"{ACTOR}.strategy=veomni"), decoder(*TINY))
    assert "not counted: " in describe_memory(config_with(), AutoConfig.for_model("vit"))
    assert "not counted: TypeError" in describe_memory(config_with("data.max_prompt_length=null"), decoder(*TINY))


# ---- the model ----


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name):
    assert model_shape(model(name)).parameters == pytest.approx(PUBLISHED[name][0], rel=0.005)


def test_a_tokens_keys_and_values():
    """Qwen2.5-7B: 28 layers x 4 heads x 128 x (key, value) x 2 bytes; eight GPUs share four heads by copying them."""
    shape = model_shape(model("Qwen2.5-7B"))
    assert [shape.kv_bytes_per_token(gpus) for gpus in (1, 2, 4, 8)] == [57_344, 28_672, 14_336, 14_336]
