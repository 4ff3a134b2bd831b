"""Describes a run in a few lines; with DRY_RUN=1 a run script prints them and starts nothing."""

from omegaconf import DictConfig

from verl.trainer.checks.run_dir import describe_start
from verl.workers.config.explore import parts_of
from verl.workers.config.sampler_choice import describe_sampler
from verl.workers.config.schedule import filters_groups, gpus_of_server, rollout_workers, schedule_of


def describe_plan(config: DictConfig) -> str:
    """Return a text about a run's model, parts, sizes, folder and first step, from its config."""
    data, trainer, model = config.data, config.trainer, config.actor_rollout_ref.model
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
    steps = trainer.total_training_steps
    lines = {
        "model": model.path + (f", LoRA of rank {model.lora_rank}" if model.lora_rank > 0 else ""),
        "parts": f"tree={tree or 'upstream'}, environment={environment}, schedule={schedule_of(config)}, "
        f"adv_estimator={config.algorithm.adv_estimator}, loss_mode={actor.policy_loss.loss_mode}, "
        f"group filtering {'on' if filters_groups(config) else 'off'}",
        "workers": f"{trainer.nnodes} node(s) x {trainer.n_gpus_per_node} {trainer.device} = {gpus}, "
        f"trainer {actor.strategy}, {servers}",
        "sampler": describe_sampler(config),
        "one step": f"{data.train_batch_size} prompts x {rollout.n} = {responses} responses, "
        f"{mini_batches * actor.ppo_epochs} update(s) of {actor.ppo_mini_batch_size * rollout.n} responses",
        "tokens": f"at most {longest} a sequence ({data.max_prompt_length} + {data.max_response_length}), "
        f"{responses * longest:,} a step, {actor.ppo_max_token_len_per_gpu} a micro-batch and worker",
        "training": f"{steps} steps" if steps else f"{trainer.total_epochs} epochs",
        "results": trainer.default_local_dir,
        "start": describe_start(config),
    }
    return "\n".join(f"{name + ':':<10}{value}" for name, value in lines.items())
