"""Writes checkpoints with upstream's FSDP checkpoint manager, from processes that talk by gloo.

    python tests/evaluation/model/shard_writer.py MODEL_FOLDER OUTPUT_FOLDER

Each case of `CASES` gets a run folder with a complete checkpoint of step 7.
"""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from peft import LoraConfig, TaskType, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import apply_fsdp2, get_fsdp_wrap_policy

from verl.evaluation.model.server import free_port
from verl.trainer.checkpoint_marker import CONFIG_FILE, MARKER

STEP = 7


@dataclass(frozen=True)
class Case:
    """A way to shard a model.

    Args:
        mesh: number of workers along each dimension of the mesh; two dimensions are HSDP.
        contents: "all" weights, or those of "lora" alone.
        use_rslora: whether the run started from an adapter with rsLoRA.
    """

    strategy: str
    mesh: tuple[int, ...]
    lora: bool
    dtype: str = "float32"
    contents: str = "all"
    use_rslora: bool = False


CASES = {
    "fsdp2": Case("fsdp2", (3,), lora=False),
    "fsdp2_bfloat16": Case("fsdp2", (2,), lora=False, dtype="bfloat16"),
    "fsdp1": Case("fsdp", (2,), lora=False),
    "fsdp1_one_worker": Case("fsdp", (1,), lora=False),
    "hsdp_lora": Case("fsdp2", (2, 2), lora=True),
    "fsdp1_lora": Case("fsdp", (2,), lora=True),
    "rslora": Case("fsdp2", (2,), lora=True, use_rslora=True),
    "lora_alone": Case("fsdp2", (2,), lora=True, contents="lora"),
}


def trained_model(folder: Path, lora: bool, use_rslora: bool = False) -> torch.nn.Module:
    """Return the model in `folder` with seeded changes of all weights, or with random factors of LoRA."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if lora:
        config = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=6, target_modules="all-linear", bias="none")
        config.use_rslora = use_rslora
        model = get_peft_model(model, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if lora == ("lora_" in name):
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def write_shards(rank: int, case: Case, port: int, model_folder: str, actor: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = int(torch.tensor(case.mesh).prod())
    dist.init_process_group("gloo", rank=rank, world_size=workers)
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=("ddp", "fsdp")[-len(case.mesh) :])
    model = trained_model(Path(model_folder), case.lora, case.use_rslora)
    if case.strategy == "fsdp2":
        apply_fsdp2(model, {"mesh": mesh}, {})
    else:
        policy = get_fsdp_wrap_policy(model, is_lora=case.lora)
        model = FSDP(model, auto_wrap_policy=policy, device_mesh=mesh, device_id=torch.device("cpu"))
    contents = {"save_contents": ["model"], "load_contents": ["model"], "save_lora_only": case.contents == "lora"}
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    FSDPCheckpointManager(model, processing_class=tokenizer, checkpoint_config=contents).save_checkpoint(actor)
    dist.destroy_process_group()


def main(model_folder: str, output: str) -> None:
    for name, case in CASES.items():
        checkpoint = Path(output, name, f"global_step_{STEP}")
        arguments = (case, free_port(), model_folder, str(checkpoint / "actor"))
        workers = int(torch.tensor(case.mesh).prod())
        multiprocessing.start_processes(write_shards, arguments, nprocs=workers, start_method="fork")
        model, rollout = {"path": model_folder}, {"dtype": case.dtype}
        if case.use_rslora:
            model |= {"lora_adapter_path": "outputs/start", "lora": {"use_rslora": True}}
        (checkpoint / CONFIG_FILE).write_text(json.dumps({"actor_rollout_ref": {"model": model, "rollout": rollout}}))
        (checkpoint / MARKER).write_text(f"{STEP}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
