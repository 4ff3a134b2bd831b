"""Runs all checks of a run before Ray starts; each raises a ValueError for the first problem that it sees."""

import os
from pathlib import Path

import pyarrow.parquet as pq
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checks.model.lora import check_lora
from verl.trainer.checks.model.settings import (
    check_attention,
    check_context,
    check_cpu_attention,
    check_cpu_strategy,
    check_fused_kernels,
    check_prefix_tree,
    model_json,
)
from verl.trainer.checks.parts import check_parts, check_transport, check_typed_sections, check_whole_servers
from verl.trainer.checks.prompts import check_prompts
from verl.trainer.checks.resources.cluster import config_asks_for_cpu
from verl.trainer.checks.resources.disk import check_disk
from verl.trainer.checks.rows import (
    check_data_files,
    check_prompt_lengths,
    check_reference_answers,
    check_reward_rows,
    data_files,
)
from verl.trainer.checks.run_dir import check_resume_path, check_resumed_step, check_same_method
from verl.trainer.checks.trackers import check_trackers
from verl.trainer.checks.values import check_registered
from verl_patches.plugin import activate_cpu


def check_run(config: DictConfig) -> None:
    """Check a settled config: its parts, then the rows, then the folder from which the run would resume."""
    if config_asks_for_cpu(config):
        activate_cpu()
    check_model(config)
    check_typed_sections(config)
    check_engines(config)
    check_parts(config)
    check_trackers(config)
    check_prompt_lengths(config)
    check_files(config)
    check_reward_rows(config)
    check_registered(config)  # after the reward's module, which may register a reward manager
    check_reference_answers(config)
    check_batch_sizes(config)
    check_micro_batches_and_servers(config)
    check_prompts(config)
    check_overlong_buffer(config)
    check_resume_path(config)
    check_resumed_step(config)
    check_same_method(config)
    check_disk(config)


def check_model(config: DictConfig) -> None:
    """Check that the model exists, and the critic's if the run trains one; see `check_model_path`."""
    from verl.trainer.ppo.utils import need_critic

    check_model_path("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    if need_critic(config):
        check_model_path("critic.model.path", config.critic.model.path)


def check_model_path(key: str, path: str) -> None:
    """Check that a local folder holds a config.json, and that another path looks like a name on the hub. With
    HF_HUB_OFFLINE such a model must be in the hub's cache; otherwise the download checks the name."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise ValueError(f"{key}={path} is a folder without config.json, so no Hugging Face model")
        return
    looks_like_a_hub_name = path.count("/") <= 1 and not path.startswith((".", "~", "/", "outputs"))
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    if "://" not in path and (not looks_like_a_hub_name or (offline and model_json(path) is None)):
        raise ValueError(f"{key}={path} does not exist")


def check_engines(config: DictConfig) -> None:
    """Check that trainer and server support the config with this model."""
    import torch

    model, cuda_is_here = model_json(config.actor_rollout_ref.model.path), torch.cuda.is_available()
    check_context(config, model)
    check_attention(config, cuda_is_here)
    check_cpu_attention(config, model)
    check_cpu_strategy(config)
    check_fused_kernels(config, model)
    check_prefix_tree(config, model)
    check_lora(config)
    check_transport(config, cuda_is_here)


def check_files(config: DictConfig) -> None:
    """Check the files of training and validation, unless a dataset class of the run's own reads them."""
    for key in () if OmegaConf.select(config, "data.custom_cls.path") else ("train_files", "val_files"):
        check_data_files(f"data.{key}", config.data[key], config.data.prompt_key)


def check_batch_sizes(config: DictConfig) -> None:
    """Check that a batch divides into mini-batches, and that the training files hold a batch of rows: upstream drops an
    incomplete last batch without a message. Rows are counted before the filter of long prompts."""
    batch, key = config.data.train_batch_size, "actor_rollout_ref.actor.ppo_mini_batch_size"
    if batch % (mini_batch := OmegaConf.select(config, key)):
        raise ValueError(f"data.train_batch_size={batch}: expected a multiple of {key}={mini_batch}")
    files, all_are_here = data_files(config, "train_files")
    if all_are_here and batch > (rows := sum(pq.read_metadata(file).num_rows for file in files)):
        raise ValueError(f"data.train_batch_size={batch} but the training data has {rows} rows")
    if batch > (samples := config.data.get("train_max_samples", -1)) > 0:
        raise ValueError(f"data.train_batch_size={batch} but data.train_max_samples={samples}")


def check_micro_batches_and_servers(config: DictConfig) -> None:
    """Check that a micro-batch holds the longest sequence, and that the GPUs make whole servers."""
    actor, rollout, ref = (config.actor_rollout_ref[role] for role in ("actor", "rollout", "ref"))
    longest, parallel = rollout.prompt_length + rollout.response_length, actor.ulysses_sequence_parallel_size
    budgets = {
        "actor.ppo_max_token_len_per_gpu": actor.use_dynamic_bsz,
        "rollout.log_prob_max_token_len_per_gpu": rollout.log_prob_use_dynamic_bsz,
        "ref.log_prob_max_token_len_per_gpu": ref.log_prob_use_dynamic_bsz,
    }
    for key, is_read in budgets.items():
        budget = OmegaConf.select(config.actor_rollout_ref, key)
        if is_read and budget and budget * parallel < longest:
            raise ValueError(
                f"actor_rollout_ref.{key}={budget} with ulysses_sequence_parallel_size={parallel}: expected at least "
                f"{longest} tokens in all (data.max_prompt_length + data.max_response_length)"
            )
    check_whole_servers("trainer", config.trainer, rollout)  # with schedule=separate_async they hold servers, too
    if (rollout.max_num_batched_tokens or rollout.max_num_seqs) < rollout.max_num_seqs:
        key, value = "actor_rollout_ref.rollout.max_num_batched_tokens", rollout.max_num_batched_tokens
        raise ValueError(f"{key}={value}: vLLM expects at least max_num_seqs={rollout.max_num_seqs}")


def check_overlong_buffer(config: DictConfig) -> None:
    """Check that the overlong buffer is shorter than a response, as it would otherwise penalize every response."""
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    buffer, budget = OmegaConf.select(config, key), config.data.max_response_length
    if buffer is not None and buffer.enable and buffer.len >= budget:
        raise ValueError(
            f"{key}.len={buffer.len} must be below data.max_response_length={budget}, else every response is "
            f"penalized; lower it, or set {key}.enable=false"
        )
