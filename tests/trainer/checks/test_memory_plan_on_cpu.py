"""A run's memory against formulas and measured allocations; every GPU run script against cards of 80 GB."""

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM
from verl.utils.torch_functional import entropy_from_logits_with_chunking

from tests.configs import composed
from tests.recipe.test_run_scripts_on_cpu import SCRIPTS
from tests.trainer.checks.models import TINY, decoder, model
from verl.trainer.checks.memory_plan import CONTEXTS, describe_memory, logits_bytes, micro_batch_tokens, plan_memory
from verl.trainer.checks.run_plan import describe_plan

ROOT = Path(__file__).resolve().parents[3]
GPU_SCRIPTS = [script for script in SCRIPTS if not script.endswith("_cpu.sh")]


ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))
KNOWN = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{ACTOR}.entropy_from_logits_with_chunking": False,
    f"{ACTOR}.fsdp_config.use_torch_compile": True,
    f"{ACTOR}.fsdp_config.param_offload": False,
    f"{ACTOR}.fsdp_config.optimizer_offload": False,
    f"{ROLLOUT}.tensor_model_parallel_size": 1,
    f"{ROLLOUT}.gpu_memory_utilization": 0.7,
    f"{ROLLOUT}.max_num_seqs": 256,
}


def known_config(*overrides: str):
    """The settings that the tests by hand count with, whatever the profile's are."""
    return composed("grpo_trainer", "hardware=gpu", *(f"{key}={value}" for key, value in KNOWN.items()), *overrides)


def test_the_trainers_states():
    """7.6156e9 parameters in fp32 over 8 GPUs: 3.808 GB each, the same for gradients, twice for Adam."""
    plan = plan_memory(known_config(), model("Qwen2.5-7B"))
    trainer = plan.trainer
    assert (plan.shards, plan.shape.parameters) == (8, 7_615_616_512)
    states = (trainer.parameters, trainer.gradients, trainer.optimizer, trainer.kept_parameters, trainer.kept_optimizer)
    assert states == pytest.approx((3.808, 3.808, 7.616, 3.808, 7.616), rel=1e-3)
    assert plan.rollout == pytest.approx(0.7 * 80 + 3.808 + 7.616 + CONTEXTS, rel=1e-3)
    assert plan.host == 0 and plan.host_loading == pytest.approx(30.46, rel=1e-3)


def test_the_update_adds_up():
    """Qwen2.5-7B by hand: 544,997,376 parameters in the vocabulary's matrix, 233,057,792 in a layer; 16,384 tokens."""
    trainer = plan_memory(known_config(), model("Qwen2.5-7B")).trainer
    gathered, unreduced = 2 * (0.544997 + 2 * 0.233058), (2 + 4) * 0.544997
    hidden_states = 16_384 * 28 * 3584 * 2 / 1e9
    layer = 16_384 * (12 * 18_944 + 18 * 3584 + 10 * (28 + 4) * 128) / 1e9  # more than the logits' 4.98
    total = 4 * 3.808 + gathered + unreduced + hidden_states + layer + CONTEXTS
    assert trainer.update == pytest.approx(total, rel=1e-3) and total == pytest.approx(33.3, abs=0.1)
    fsdp = f"{ACTOR}.fsdp_config"
    whole = plan_memory(known_config(f"{fsdp}.reshard_after_forward=false"), model("Qwen2.5-7B")).trainer
    assert whole.gathered == pytest.approx(2 * 7.6156, rel=1e-3)
    waiting = plan_memory(known_config(f"{fsdp}.use_no_sync_for_gradient_accumulation=true"), model("Qwen2.5-7B"))
    assert waiting.trainer.unreduced == pytest.approx(4 * 7.6156 + 2 * 0.545, rel=1e-3)


def test_a_server_that_does_not_sleep_stays_during_the_update():
    asleep = known_config()
    awake = known_config(f"{ROLLOUT}.free_cache_engine=false")
    elsewhere = known_config(
        f"{ROLLOUT}.free_cache_engine=false", "actor_rollout_ref.hybrid_engine=false", f"{ROLLOUT}.nnodes=2"
    )
    asleep, awake, elsewhere = (plan_memory(config, model("Qwen2.5-7B")) for config in (asleep, awake, elsewhere))
    assert awake.trainer.update - asleep.trainer.update == pytest.approx(0.7 * 80)
    assert elsewhere.trainer.update == asleep.trainer.update
    assert elsewhere.rollout == 0.7 * 80 + CONTEXTS and elsewhere.server.responses == 256 * 8 / 16


def test_offloaded_states_leave_the_gpu_for_the_rollout_only():
    fsdp = f"{ACTOR}.fsdp_config"
    none, both = (
        plan_memory(known_config(f"{fsdp}.param_offload={on}", f"{fsdp}.optimizer_offload={on}"), model("Qwen2.5-7B"))
        for on in ("false", "true")
    )
    assert both.trainer.update == none.trainer.update
    assert both.rollout == pytest.approx(0.7 * 80 + CONTEXTS)
    assert none.trainer.log_prob - both.trainer.log_prob == pytest.approx(7.616, rel=1e-3)  # Adam
    assert both.host == pytest.approx(12 * 7.6156, rel=1e-3)  # fp32 parameters and two states, on one node


@pytest.mark.parametrize(("nodes", "size", "shards", "host"), [(1, -1, 8, 30.46), (2, -1, 16, 15.23), (2, 8, 8, 30.46)])
def test_a_reference_policy_lives_on_the_host(nodes, size, shards, host):
    """4 bytes for each of 7.6156e9 parameters, shared by the nodes unless each holds all shards."""
    overrides = (f"trainer.nnodes={nodes}", f"{ACTOR}.fsdp_config.fsdp_size={size}")
    with_kl = known_config(*overrides, f"{ACTOR}.use_kl_loss=true")
    without, plan = (plan_memory(config, model("Qwen2.5-7B")) for config in (known_config(*overrides), with_kl))
    assert plan.shards == shards and without.host == 0
    assert plan.host == pytest.approx(host, rel=1e-3)
    assert plan.trainer == without.trainer


def test_every_process_reads_a_tied_model():
    assert plan_memory(known_config(), model("Qwen2.5-3B")).host_loading == pytest.approx(8 * 4 * 3.086, rel=1e-3)


def test_the_server_and_its_waves():
    """By hand: 80 GB x 0.7 - 15.2312 of weights - 3 = 37.7688 GB of 57,344 bytes; 256 x 8 responses on 8 servers."""
    server = plan_memory(known_config("data.max_response_length=7936"), model("Qwen2.5-7B")).server
    assert server.tokens == pytest.approx(37.7688e9 / 57_344, rel=1e-5)
    assert (server.sequences, server.responses, server.waves) == (658_635 // 8192, 256, 4)
    two = known_config(f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.max_num_seqs=100")
    server = plan_memory(two, model("Qwen2.5-7B")).server
    assert server.weights == pytest.approx(7.6156, rel=1e-3)
    assert (server.responses, server.waves) == (512, 6)


def test_a_limit_of_tokens_is_of_one_gpu():
    """Upstream's micro-batches of `sp_size` times the limit: two of two sequences, which two GPUs then share."""
    from verl.workers.engine.utils import prepare_micro_batches

    from verl.utils import tensordict_utils as tu

    rows = torch.nested.as_nested_tensor([torch.ones(8, dtype=torch.long)] * 4, layout=torch.jagged)
    limits = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 8, "sp_size": 2}
    micro_batches, _ = prepare_micro_batches(tu.get_tensordict({"input_ids": rows}, limits))
    assert [len(batch["input_ids"].values()) for batch in micro_batches] == [16, 16]
    parallel = f"{ACTOR}.ulysses_sequence_parallel_size=2"
    assert micro_batch_tokens(known_config(parallel, f"{ACTOR}.ppo_max_token_len_per_gpu=9000")) == (9000, 9000)
    rows_of_1000_tokens = known_config(
        parallel,
        "data.max_prompt_length=100",
        "data.max_response_length=900",
        f"{ACTOR}.use_dynamic_bsz=false",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=5",
    )
    assert micro_batch_tokens(rows_of_1000_tokens) == (1500, 2500)


def peak_bytes(function) -> int:
    """The most that is allocated at once while `function` runs, torch's temporaries included.

    Not oneDNN's, which reorders matrices on processors with instructions for bfloat16, and which no GPU has.
    """
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


TOKENS, VOCABULARY = 512, 8192


class CrossEntropy(torch.autograd.Function):
    """As flash-attn's: no matrix but the logits, and their gradient, written over them where that is allowed."""

    @staticmethod
    def forward(ctx, logits, in_place):
        ctx.save_for_backward(logits)
        ctx.in_place = in_place
        return logits[:, 0].float()

    @staticmethod
    def backward(ctx, gradient):
        (logits,) = ctx.saved_tensors
        return (logits if ctx.in_place else torch.empty_like(logits)).copy_(gradient[:, None]), None


def entropy_as_under_autocast_on_cuda(logits, chunk_size):
    """Upstream's `entropy_from_logits` with the casts to fp32 that CPU's autocast does not make."""
    probabilities = torch.softmax(logits.float(), -1)
    return torch.logsumexp(logits.float(), -1) - torch.sum(probabilities * logits, -1)


ENTROPIES = {"none": None, "whole": entropy_as_under_autocast_on_cuda, "chunks": entropy_from_logits_with_chunking}


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("entropy", ENTROPIES)
def test_logits_and_entropies_against_measured_allocations(temperature, training, entropy):
    """The same order of allocations as in upstream's forward step and the backward pass after it."""
    config = known_config(
        f"{ROLLOUT}.temperature={temperature}",
        f"{ACTOR}.entropy_from_logits_with_chunking={entropy == 'chunks'}",
        f"{ACTOR}.entropy_from_logits_chunk_size=64",
        f"{ACTOR}.fsdp_config.use_torch_compile=false",
    )
    function = ENTROPIES[entropy]
    hidden, head = (torch.ones(size, 8, dtype=torch.bfloat16) for size in (TOKENS, VOCABULARY))

    def forward_step():
        raw_output = hidden @ head.T  # lives until the step returns
        logits = raw_output if temperature == 1 else raw_output / torch.full((TOKENS, 1), temperature).bfloat16()
        values = function(logits, 64).sum() if function else 0
        return CrossEntropy.apply(logits, function is None).sum() + values

    def step():
        hidden.requires_grad_(training)
        loss = forward_step()
        if training:
            loss.backward()

    step()
    measured = peak_bytes(step) / (TOKENS * VOCABULARY)
    counted = logits_bytes(config, VOCABULARY, TOKENS, function is not None, training) / (TOKENS * VOCABULARY)
    assert counted >= 0.98 * measured
    # an entropy in the loss is counted for the largest chunk in any order of gradients
    assert counted <= (1.3 if training and function else 1.02) * measured


def test_chunks_are_what_makes_long_micro_batches_possible():
    """16,384 tokens of 152,064 logits: 2 bytes each, and 12 for those whose entropy is computed; at most 4 compiled."""
    chunking, compiling = (f"{ACTOR}.{key}" for key in ("entropy_from_logits_with_chunking", "fsdp_config"))
    settings = {
        16_384 * 152_064 * (2 + 12): (f"{compiling}.use_torch_compile=false",),
        16_384 * 152_064 * (2 + 4): (),
        16_384 * 152_064 * 2 + 2048 * 152_064 * 12: (f"{chunking}=true",),
    }
    for expected, overrides in settings.items():
        assert logits_bytes(known_config(*overrides), 152_064, 16_384, entropy=True, training=False) == expected


def test_a_temperature_that_changes_copies_the_logits():
    for overrides, size in (((), 4), (("hato.exploration.temperature_decay=0",), 2)):
        config = composed("hato_trainer", "hardware=gpu", *overrides, recipe="hato")
        assert logits_bytes(config, 10, 10, entropy=False, training=True) == size * 100


@pytest.mark.parametrize(
    "shape", [("qwen3", 256, 768, 4, 8, 2, 16, 1024, False, 32), ("llama", 256, 512, 5, 8, 8, 16, 1024)]
)
def test_activations_against_measured_allocations(shape):
    """A whole model with gradient checkpointing, a vocabulary of 16, and gradients that are there already."""
    plan = plan_memory(known_config(f"{ACTOR}.ppo_max_token_len_per_gpu=256"), decoder(*shape))
    trained = AutoModelForCausalLM.from_config(decoder(*shape), attn_implementation="sdpa").bfloat16().train()
    trained.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for parameter in trained.parameters():
        parameter.grad = torch.zeros_like(parameter)
    tokens = {"input_ids": torch.zeros(1, 256, dtype=torch.long), "position_ids": torch.arange(256)[None]}
    measured = peak_bytes(lambda: trained(**tokens, use_cache=False).logits.float().sum().backward())
    counted = 1e9 * (plan.trainer.hidden_states + plan.trainer.layer)
    assert 0.97 * measured < counted < 1.25 * measured


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
    small = ("llama3.1_8b_instruct", "llama3.2_3b_instruct", "qwen2.5_math_1.5b", "qwen2.5_math_7b")
    assert nodes == large | {f"recipe/hapo/run_{name}.sh": 4 for name in small}


@pytest.mark.parametrize("script", GPU_SCRIPTS)
def test_every_gpu_script_fits_80_gb(configs, script):
    config = configs[script]
    plan = plan_memory(config, model(config.actor_rollout_ref.model.path), gpu=80)
    assert plan.problems() == []
    assert plan.trainer.update > 0 and plan.server.sequences > 0


def test_the_plan_of_a_gpu_run_tells_its_memory(tmp_path):
    decoder(*TINY).save_pretrained(tmp_path)
    config = known_config(f"{MODEL}.path={tmp_path}")
    text = describe_plan(config)
    assert describe_memory(config) in text
    assert "update:" in text and "KV cache:" in text and "wave(s)" in text and "warning" not in text
    assert "memory:" not in describe_plan(composed("grpo_trainer", "hardware=cpu", f"{MODEL}.path={tmp_path}"))


def test_overrides_of_the_models_config_count(tmp_path):
    decoder(*TINY).save_pretrained(tmp_path)
    path, longer = f"{MODEL}.path={tmp_path}", f"+{MODEL}.override_config.num_hidden_layers=30"
    short, long = (describe_memory(known_config(*overrides)) for overrides in ((path,), (path, longer)))
    assert "tokens of 384 bytes" in short and "tokens of 3,840 bytes" in long  # layers x 2 heads x 16 x 2 x 2


def test_what_does_not_fit_is_a_warning():
    """By hand: 14.77e9 parameters in fp32 with Adam's states are 22.2 GB on each of 8 GPUs, beside 56 of vLLM."""
    text = describe_memory(known_config(), model("Qwen3-14B"))
    assert "warning:  rollout: does not fit, 82 GB where 80 are" in text and "optimizer_offload" in text
    huge = known_config(
        f"{ACTOR}.ppo_max_token_len_per_gpu=100000",
        f"{ROLLOUT}.max_model_len=40000",
        f"{ROLLOUT}.gpu_memory_utilization=0.42",
    )
    warnings = [line for line in describe_memory(huge, model("Qwen3-14B")).splitlines() if line.startswith("warning:")]
    assert [line.split()[1] for line in warnings] == ["update:", "old", "KV"]


def test_what_cannot_be_counted_is_a_note():
    absent = describe_memory(known_config(f"{MODEL}.path=nobody/has-this-model"))
    unknown = "whether the run fits is unknown, as the config of nobody/has-this-model is not on this machine"
    assert absent == f"memory:   not counted: {unknown}"
    assert "not counted" in describe_memory(known_config(f"{MODEL}.lora_rank=8"), decoder(*TINY))
    assert "not counted: " in describe_memory(known_config(), AutoConfig.for_model("vit"))
    assert "not counted: TypeError" in describe_memory(known_config("data.max_prompt_length=null"), decoder(*TINY))
