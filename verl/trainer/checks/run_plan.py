"""Describes a run in a few lines; with DRY_RUN=1 a run script prints them and starts nothing."""

import pyarrow.parquet as pq
from omegaconf import DictConfig

from verl.trainer.checks.model.lora import describe_lora
from verl.trainer.checks.resources.disk import describe_disk
from verl.trainer.checks.resources.memory_plan import describe_memory
from verl.trainer.checks.rows import data_files
from verl.trainer.checks.run_dir import describe_start
from verl.workers.config.explore import parts_of
from verl.workers.config.sampler_choice import describe_sampler
from verl.workers.config.schedule import filters_groups, gpus_of_server, rollout_workers, schedule_of


def describe_schedule(config: DictConfig) -> str:
    """Return the schedule's name and, if it is asynchronous, its batches ahead and the largest age of groups."""
    schedule = schedule_of(config)
    section, sampler = config.trainer.v1.get(schedule, {}), config.trainer.v1.sampler
    if "num_warmup_batches" not in section:
        return schedule
    bound = sampler.max_off_policy_threshold
    return f"{schedule}, {section.num_warmup_batches} batch(es) ahead, " + (
        "groups of any age" if bound is None else f"groups of at most {bound} steps ({sampler.max_off_policy_strategy})"
    )


def describe_steps(config: DictConfig) -> str:
    """Return the number of steps and the key that decides it; `trainer.total_epochs` does if no steps are set."""
    if steps := config.trainer.total_training_steps:
        return f"{steps} steps (trainer.total_training_steps, not trainer.total_epochs)"
    files, all_are_here = data_files(config, "train_files")
    epochs, most = config.trainer.total_epochs, config.data.get("train_max_samples", -1)
    if not all_are_here:
        return f"{epochs} epochs (trainer.total_epochs)"
    rows = sum(pq.read_metadata(file).num_rows for file in files)
    batches = (min(rows, most) if most > 0 else rows) // config.data.train_batch_size
    filtered = "at most " * bool(config.data.get("filter_overlong_prompts"))
    return f"{filtered}{epochs * batches} steps (trainer.total_epochs={epochs} of {filtered}{batches} batches)"


def describe_plan(config: DictConfig) -> str:
    """Return a text about a run's model, workers, batch sizes, tokens and, on GPUs, memory, from its config."""
    data, trainer = config.data, config.trainer
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    gpus = trainer.nnodes * trainer.n_gpus_per_node
    replica = gpus_of_server(rollout)
    responses = data.train_batch_size * rollout.n
    longest = data.max_prompt_length + data.max_response_length
    mini_batches = data.train_batch_size // actor.ppo_mini_batch_size
    tree, environment = parts_of(rollout)
    servers = (
        f"{own} {trainer.device} of the rollout's own, {own // replica} replica(s) of {replica}"
        if (own := rollout_workers(config))
        else f"{gpus // replica} rollout replica(s) of {replica}"
    )
    model = config.actor_rollout_ref.model
    lines = {
        "model": model.path,
        **({"LoRA": describe_lora(model)} if model.lora_rank > 0 else {}),
        "parts": f"tree={tree or 'upstream'}, environment={environment}, "
        f"adv_estimator={config.algorithm.adv_estimator}, loss_mode={actor.policy_loss.loss_mode}, "
        f"group filtering {'on' if filters_groups(config) else 'off'}",
        "workers": f"{trainer.nnodes} node(s) x {trainer.n_gpus_per_node} {trainer.device} = {gpus}, "
        f"trainer {actor.strategy}, {servers}",
        "schedule": describe_schedule(config),
        "sampler": describe_sampler(config),
        "one step": f"{data.train_batch_size} prompts x {rollout.n} = {responses} responses, "
        f"{mini_batches * actor.ppo_epochs} update(s) of {actor.ppo_mini_batch_size * rollout.n} responses",
        "tokens": f"at most {longest} a sequence ({data.max_prompt_length} + {data.max_response_length}), "
        f"{responses * longest:,} a step, {actor.ppo_max_token_len_per_gpu} a micro-batch and worker",
        "training": f"{describe_steps(config)}, validation every {trainer.test_freq} steps, "
        f"checkpoint every {trainer.save_freq}",
        "files": f"train {data.train_files}, validation {data.val_files}",
        "results": trainer.default_local_dir,
        "disk": describe_disk(config),
        "start": describe_start(config),
    }
    plan = "\n".join(f"{name + ':':<10}{value}" for name, value in lines.items())
    return f"{plan}\n{describe_memory(config)}" if trainer.device == "cuda" else plan
