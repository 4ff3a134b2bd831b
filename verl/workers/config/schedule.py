"""The schedules of rollout and update, and the config keys that are set when a run starts.

schedule=sync              rollout, then update, on the same GPUs
schedule=colocate_async    the same GPUs; prompts are submitted ahead, unfinished responses pause for the update
schedule=separate_async    the rollout runs all the time, on its own GPUs

`trainer.v1.trainer_mode` chooses the schedule by naming one of our trainers or of upstream's.
"""

import math

from omegaconf import DictConfig, OmegaConf, open_dict

# trainer.v1.trainer_mode -> upstream's trainer with the same schedule; `watched_sync` is upstream's own synchronous
# trainer in a run that is watched
SCHEDULE_OF_TRAINER = {
    "watched_sync": "sync",
    "explore": "sync",
    "explore_colocate_async": "colocate_async",
    "explore_separate_async": "separate_async",
}
# names of the trainers that have components
EXPLORE_TRAINERS = tuple(name for name in SCHEDULE_OF_TRAINER if name != "watched_sync")
ASYNCHRONOUS = ("colocate_async", "separate_async")
SAVED_ROWS = "transfer_queue"  # upstream's folder in a checkpoint for unfinished prompts
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
CPU_BACKEND, CPU_MODULE = "cpu", "verl.checkpoint_engine.cpu_checkpoint_engine"


def schedule_of(config: DictConfig) -> str:
    """Return `sync`, `colocate_async` or `separate_async`, as upstream names its trainers; other modes unchanged."""
    mode = OmegaConf.select(config, "trainer.v1.trainer_mode", default="sync")
    return SCHEDULE_OF_TRAINER.get(mode, mode)


def filters_groups(config: DictConfig) -> bool:
    """Return whether the run drops groups whose rewards do not vary, by `algorithm.filter_groups.enable`."""
    return bool(OmegaConf.select(config, "algorithm.filter_groups.enable", default=False))


def rollout_workers(config: DictConfig) -> int:
    """Return the number of workers (GPUs) that only the rollout uses: 0 but for `separate_async`."""
    if schedule_of(config) != "separate_async":
        return 0
    rollout = config.actor_rollout_ref.rollout
    return rollout.nnodes * rollout.n_gpus_per_node


def gpus_of_server(rollout: DictConfig) -> int:
    """Return the number of workers (GPUs) of one rollout server, from the section `actor_rollout_ref.rollout`."""
    kinds = ("tensor_model", "data", "pipeline_model")
    return math.prod(rollout.get(f"{kind}_parallel_size", 1) for kind in kinds)


def settle_schedule(config: DictConfig) -> None:
    """Set the null keys of `schedule=separate_async`: number of updates per step, and backend that sends the weights;
    on CPU, raise Ray's number of virtual GPUs to one per worker."""
    if schedule_of(config) != "separate_async":
        return
    on_cpu, section = config.trainer.device == "cpu", config.trainer.v1.separate_async
    actor, engine = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.checkpoint_engine
    with open_dict(config):
        if section.parameter_sync_step is None:
            section.parameter_sync_step = max(1, config.data.train_batch_size // actor.ppo_mini_batch_size)
        if engine.backend is None:
            engine.backend = CPU_BACKEND if on_cpu else "nccl"
        if engine.backend == CPU_BACKEND:
            engine.custom_backend_module = CPU_MODULE
        if on_cpu and config.ray_kwargs.ray_init.get("num_gpus") is not None:
            needed = config.trainer.nnodes * config.trainer.n_gpus_per_node + rollout_workers(config)
            config.ray_kwargs.ray_init.num_gpus = max(needed, config.ray_kwargs.ray_init.num_gpus)
