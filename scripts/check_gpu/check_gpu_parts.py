"""The parts that scripts/check_gpu/check_gpu.sh checks: a table with the command and the time limit of each."""

import os
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
# vLLM gets a small share of the memory: with more, the tiny model's cache would have millions of blocks.
STEPS = (
    "data.train_batch_size=8 actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.rollout.max_num_seqs=64 "
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.3 actor_rollout_ref.rollout.agent.num_workers=1 "
    "reward.num_workers=1 transfer_queue.backend.SimpleStorage.num_data_storage_units=1 trainer.n_gpus_per_node=1 "
    # No torch.compile and no CUDA graphs: without a cache they take minutes. Only the part `grpo` has both.
    "actor_rollout_ref.rollout.enforce_eager=true "
    "trainer.total_training_steps=2 trainer.save_freq=2 trainer.test_freq=2 trainer.val_before_train=false"
)
COUNTDOWN = (
    f"{STEPS} data.max_prompt_length=128 data.max_response_length=32 reward.reward_kwargs.overlong_buffer_cfg.len=8"
)
# Filtering needs groups with right and wrong answers, and only a warm-started model gives such groups.
FILTER = "algorithm.filter_groups.enable=$WARM"
HAPO_SCRIPT = "CONFIG_DIR=recipe/hapo/config METHOD=hapo bash recipe/common/run_countdown.sh"
HATO_SCRIPT = "CONFIG_DIR=recipe/hato/config METHOD=hato bash recipe/common/run_countdown.sh"
HATO = "hato.tree.max_step_tokens=4 hato.tree.max_depth=2 hato.tree.branching_factor=4"
LATR = (
    "'actor_rollout_ref.rollout.kt.rollout_filter_steps=[3,5]' actor_rollout_ref.rollout.kt.prob_filter_abs_thres=0.05 "
    "actor_rollout_ref.rollout.kt.prob_filter_rel_thres=0.8"
)
TOOLS = "actor_rollout_ref.rollout.tools.tool_instances.search.params.corpus=$DATA_DIR/corpus.jsonl"
AGENT = f"MAX_PROMPT_LENGTH=128 MAX_RESPONSE_LENGTH=256 bash recipe/common/run_math.sh task=search_task {STEPS} {TOOLS}"
ARPO = f"CONFIG_DIR=recipe/arpo/config METHOD=arpo {AGENT}"
# What vLLM's two model runners do in different code, tried together: seeds, LoRA, scores of answers; V1 also has HAPO's
# temperature. vLLM 0.24 takes V1 for Qwen2, the base model, and V2 for Qwen3.
V1, V2 = "MODEL_PATH=$BASE_MODEL", "MODEL_PATH=$QWEN3"
FEATURES = "+actor_rollout_ref.rollout.custom.request_seeds=true credit=igpo update=tree"
TWO_GPUS, ON_TWO = "N_GPUS_PER_NODE=2 TENSOR_PARALLEL=2", f"{ARPO} trainer.n_gpus_per_node=2"
SFT = "data.train_batch_size=32 $SFT_SETTINGS"


class Part(NamedTuple):
    """A bash command that runs in the repository's root and should take `seconds`; after twice as long it is ended.

    It needs `gpus` GPUs. With DRY_RUN=1 the `dry_command` runs instead, if there is one. The command sees HARDWARE=gpu,
    a RUN_DIR and EXPERIMENT_NAME of its own, the DATA_DIR of `task`, CHECK_DIR (the folder of all parts), SFT_SETTINGS
    (overrides for supervised training of the model), WARM (whether a part has made the warm start of `task`),
    MODEL_PATH (the warm start, or without one BASE_MODEL), and QWEN3 (a tiny Qwen3 with random weights).
    """

    name: str
    seconds: int
    command: str
    task: str = "countdown"
    dry_command: str = ""
    gpus: int = 1


# The seconds add up to less than the hour that scripts/check_gpu/check_gpu.sh promises. With 16 cores and an H100 the
# part `latr`, beside two others, took 220 seconds from its start to the end of its first step: imports, not the GPU.
PARTS = (
    Part(
        "environment",
        60,
        "python -m torch.utils.collect_env; python -c 'import torch; torch.cuda.init(); import flash_attn, verl, vllm'",
        dry_command="python -m torch.utils.collect_env",
    ),
    Part(
        "kernels",
        140,
        "python -m benchmarks.gpu_kernels",
        dry_command="python -m benchmarks.gpu_kernels --device cpu --small --repeats 1",
    ),
    Part("inputs", 90, 'python scripts/check_gpu/check_gpu_inputs.py "$RUN_DIR" "$BASE_MODEL"'),
    Part("warm_start", 130, f"MODEL_PATH=$BASE_MODEL bash recipe/common/run_warm_start.sh {SFT}"),
    Part(
        "grpo",
        240,
        f"bash recipe/common/run_grpo_countdown.sh {COUNTDOWN} actor_rollout_ref.rollout.enforce_eager=false",
    ),
    Part("dapo", 240, f"bash recipe/common/run_dapo_countdown.sh {COUNTDOWN} {FILTER}"),
    Part("hapo", 240, f"{HAPO_SCRIPT} {COUNTDOWN} {FILTER}"),
    Part("latr", 240, f"bash recipe/latr/grpo-kt-countdown.sh update=tree {COUNTDOWN} {LATR}"),
    Part("hato", 240, f"{HATO_SCRIPT} {COUNTDOWN} {HATO}"),
    Part(
        "cold_start",
        130,
        f"MODEL_PATH=$BASE_MODEL DATA_DIR=$DATA_DIR/sft bash recipe/arpo/run_sft.sh trainer.total_epochs=1 {SFT}",
        task="search_task",
    ),
    Part("arpo", 240, ARPO, task="search_task"),
    Part("aepo", 240, f"CONFIG_DIR=recipe/arpo/config METHOD=aepo {AGENT}", task="search_task"),
    Part("runner_v1", 240, f"LORA_RANK=8 {V1} {ARPO} {FEATURES} sampler=tempered", task="search_task"),
    Part("runner_v2", 240, f"LORA_RANK=8 {V2} {ARPO} {FEATURES}", task="search_task"),
    # shards and Ulysses; then shards and the prefix tree
    Part("two_gpus_v1", 240, f"{TWO_GPUS} {V1} SEQUENCE_PARALLEL=2 {ON_TWO}", task="search_task", gpus=2),
    Part("two_gpus_v2", 240, f"{TWO_GPUS} {V2} {ON_TWO} update=tree", task="search_task", gpus=2),
    Part(
        "evaluation",
        180,
        # evaluates the checkpoint of the part `grpo`, or the model if there is no checkpoint
        'of="model=$MODEL_PATH"; [ ! -f "$CHECK_DIR/grpo/global_step_2/COMPLETE" ] || of=step=2; '
        'bash scripts/eval-countdown.sh "${EXPERIMENT_NAME%evaluation}grpo" "$of" output_dir="$RUN_DIR" max_tokens=32 '
        '\'server.options=[--enforce-eager,--max-num-seqs,"64",--gpu-memory-utilization,"0.3"]\'',
    ),
)
WARM_STARTS = {"countdown": "warm_start", "search_task": "cold_start"}


def environment_of(part: Part, folder: Path) -> dict[str, str]:
    """Return a part's variables (see `Part`), with no network and a fitting learning rate for the tiny model."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "VERBOSE")}
    base, data = inherited.get("MODEL_PATH"), folder / "inputs" / part.task
    warm = folder / WARM_STARTS[part.task] / "huggingface"
    model_variables = {"SFT_SETTINGS": "trainer.total_training_steps=60"}
    if not base:
        base, model_variables = f"{folder}/inputs/model", {"SFT_SETTINGS": "optim.lr=2.0e-3", "HF_HUB_OFFLINE": "1"}
    part_variables = {
        "HARDWARE": "gpu",
        "NNODES": "1",
        "N_GPUS_PER_NODE": "1",
        "SEED": "0",
        "CHECK_DIR": str(folder),
        "RUN_DIR": str(folder / part.name),
        "EXPERIMENT_NAME": os.path.relpath(folder / part.name, ROOT / "outputs"),
        "DATA_DIR": str(data),
        "TRAIN_FILE": f"{data}/train.parquet",
        "VAL_FILE": f"{data}/test.parquet",
        "BASE_MODEL": base,
        "QWEN3": f"{folder}/inputs/qwen3",
        "MODEL_PATH": str(warm) if warm.is_dir() else base,
        "WARM": str(warm.is_dir()).lower(),
    }
    devices = ",".join(map(str, range(part.gpus)))
    return {"CUDA_VISIBLE_DEVICES": devices} | inherited | model_variables | part_variables
