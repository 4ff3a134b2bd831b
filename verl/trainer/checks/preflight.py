"""Checks a run before Ray starts. If anything is wrong, it prints a line that names the key, and stops.

It is a Hydra callback (`hydra.callbacks.preflight` in the recipes' YAML) and runs in the driver, after the config has
been composed and before upstream's `main` gets it. A thread watches for what only the cluster shows, an actor that Ray
can never place, since upstream would wait for such an actor forever. Every check raises a PreflightError for the first
problem that it sees.
"""

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from verl.trainer.checkpoint_marker import complete_steps, repair_tracker, tracked_step
from verl.trainer.checks.hato import EXPLORE_TRAINERS, hato_config
from verl.trainer.checks.model import (
    check_attention,
    check_context,
    check_fused_kernels,
    check_prefix_tree,
    check_weight_bucket,
    fill_max_model_len,
    model_json,
)
from verl.trainer.checks.rows import check_data_files, check_prompt_lengths, check_reward_rows, local_files
from verl.trainer.checks.run_plan import describe_plan
from verl.trainer.checks.steps_left import check_steps_left, settle_epochs
from verl.trainer.cluster_watch import watch_pending_actors
from verl.trainer.death_watch import DeathWatch
from verl.utils.atomic_files import replacing
from verl.utils.fault_reports import RunError
from verl.utils.parts import computed_fields, loss_of_switch, parts, tree_of_rollout_mode, tree_of_rollout_name
from verl.workers.config.explore import parts_of
from verl.workers.config.sampler_choice import choose_sampler, choose_seeds
from verl.workers.config.schedule import (
    SAVED_ROWS,
    check_schedule,
    check_transport,
    rollout_workers,
    schedule_of,
    settle_schedule,
)
from verl_patches.plugin import activate_cpu

# upstream's ResourcePoolManager reserves this many CPUs beside each worker's GPU (`max_colocate_count`), and so many
# beside that of a server with a GPU of its own
CPUS_PER_WORKER, CPUS_PER_SERVER = 3, 2
REQUIRED_KEYS = ("trainer.experiment_name", "actor_rollout_ref.model.path", "actor_rollout_ref.rollout.name")
WORKERS_A_NODE = 8  # upstream's default for a whole cluster, however large
WORKER_COUNTS = ("actor_rollout_ref.rollout.agent.num_workers", "reward.num_workers")
# what a checkpoint is of: a run that resumes has the same
METHOD = (
    "actor_rollout_ref.model.path",
    "actor_rollout_ref.rollout.tree",
    "actor_rollout_ref.rollout.environment",
    "algorithm.adv_estimator",
    "actor_rollout_ref.actor.policy_loss.loss_mode",
)
METHOD_FILE = "method.json"
PATHS = ("actor_rollout_ref.model.path", "data.train_files", "data.val_files", "trainer.resume_from_path")


class PreflightError(ValueError):
    """The run cannot succeed; the message names the key and says what to do."""


class Preflight(Callback):
    """Checks the config, prepares the run's folder, activates the CPU platform where the profile asks for it."""

    def on_run_start(self, config: DictConfig, **kwargs) -> None:
        try:
            settle(config)
            check_run(config)
            dry_run = os.environ.get("DRY_RUN", "0") not in ("", "0")
            check_ray_resources(config, starting=not dry_run)
            if dry_run:
                print(describe_plan(config))
                print("dry run: the config and the files are fine, nothing was started")
                raise SystemExit(0)
            check_own_machine(config)
            check_tools(config)
            prepare_run_dir(config)
            watched = (config, joins_running_cluster(config), needed_ray_cpus(config))
            threading.Thread(target=watch_pending_actors, args=watched, daemon=True).start()
            DeathWatch().start()
        except PreflightError as error:
            raise SystemExit(f"error: {error}") from None
        # Hydra turns a callback's exceptions into warnings and continues, except for SystemExit
        except Exception as error:
            import traceback

            traceback.print_exc()
            raise SystemExit(f"error: the checks before the run failed: {error!r}") from error


def settle(config: DictConfig) -> None:
    """Give every key its final value, in the driver, which has the environment of the user's command.

    Upstream resolves `${...}` in a Ray actor, which has the environment in which its node was started. Variables that
    the user exports for a run (NNODES, PWD, RAY_ADDRESS) are not set there, and the defaults would be taken. Relative
    paths are made absolute for the same reason: the actor may run in another folder.
    """
    for key in REQUIRED_KEYS:
        if OmegaConf.select(config, key) is None:
            raise PreflightError(f"{key} has no value: set it, as in {key}=...")
    for key in PATHS:
        OmegaConf.update(config, key, _absolute(OmegaConf.select(config, key)))
    config.trainer.default_local_dir = os.path.abspath(config.trainer.default_local_dir)
    for section in config:
        if section != "hydra" and OmegaConf.is_config(config[section]):
            OmegaConf.resolve(config[section])
    scale_workers(config)
    with _named_errors():
        name_parts(config.actor_rollout_ref.rollout)
        name_loss(config.actor_rollout_ref.actor)
        settle_schedule(config)
        fill_max_model_len(config)
        settle_epochs(config)
    model = model_json(config.actor_rollout_ref.model.path)
    choose_sampler(config, model)
    choose_seeds(config, model)


def scale_workers(config: DictConfig) -> None:
    """Where numbers of agent-loop or reward workers are null, set them to 8 for each node, also of a separate rollout.

    Upstream places both kinds round-robin on the nodes. With its default, each event loop of a larger cluster would
    drive more trajectories, and each process would score more answers.
    """
    nodes = config.trainer.nnodes + (config.actor_rollout_ref.rollout.get("nnodes") or 0)
    for key in WORKER_COUNTS:
        if OmegaConf.select(config, key) is None:
            OmegaConf.update(config, key, WORKERS_A_NODE * nodes)


def name_parts(rollout: DictConfig) -> None:
    """Rewrite the authors' names of trees and environments to ours, on upstream's rollout `vllm` and mode `async`.

    Raises:
        ValueError: they contradict each other.
    """
    chosen = parts_of(rollout)
    if chosen == (None, "none") or "tree" not in rollout:
        return
    rollout.tree, rollout.environment = chosen
    rollout.name = "vllm" if rollout.name in tree_of_rollout_name() else rollout.name
    rollout.mode = "async" if rollout.mode in tree_of_rollout_mode() else rollout.mode


def name_loss(actor: DictConfig) -> None:
    """The papers' switches alone choose the loss that knows them, where the config names none but upstream's."""
    losses = {loss for switch, loss in loss_of_switch().items() if actor.get(switch)}
    if actor.policy_loss.loss_mode == "vanilla" and len(losses) == 1:
        actor.policy_loss.loss_mode = losses.pop()


def _absolute(path):
    """Existing paths made absolute; anything else, such as a hub name or a URL, unchanged. Takes a path or a list."""
    if isinstance(path, str):
        return os.path.abspath(path) if os.path.exists(path) else path
    return path if path is None else [_absolute(single) for single in path]


@contextmanager
def _named_errors() -> Iterator[None]:
    """Turn a ValueError, whose message names the key, into a PreflightError."""
    try:
        yield
    except ValueError as error:
        raise PreflightError(str(error)) from error


def check_run(config: DictConfig) -> None:
    """Run all checks, in the order in which a user would fix their problems, on a config that was settled."""
    if config_asks_for_cpu(config):
        activate_cpu()
    check_model_path("actor_rollout_ref.model.path", config.actor_rollout_ref.model.path)
    check_typed_sections(config)
    check_engines(config)
    check_parts(config)
    with _named_errors():
        check_prompt_lengths(config)
        for key in ("train_files", "val_files"):
            check_data_files(f"data.{key}", config.data[key], config.data.prompt_key)
        check_reward_rows(config)
    check_batch_sizes(config)
    check_overlong_buffer(config)
    check_resume_path(config)
    check_resumed_step(config)
    check_same_method(config)


def config_asks_for_cpu(config: DictConfig) -> bool:
    """Whether the profile is `hardware=cpu`, which forwards VERL_PLATFORM=cpu to all processes."""
    return OmegaConf.select(config, "ray_kwargs.ray_init.runtime_env.env_vars.VERL_PLATFORM") == "cpu"


def check_model_path(key: str, path: str) -> None:
    """Check that a local folder holds a config.json; a name on the Hugging Face hub is checked by the download."""
    folder = Path(os.path.expanduser(path))
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise PreflightError(f"{key}={path} is a folder without config.json, so no Hugging Face model")
        return
    looks_like_a_hub_name = path.count("/") <= 1 and not path.startswith((".", "~", "/", "outputs"))
    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    if not looks_like_a_hub_name or (offline and model_json(path) is None):
        raise PreflightError(f"{key}={path} does not exist")


def check_typed_sections(config: DictConfig) -> None:
    """Build upstream's typed configs, in which an unknown key would otherwise fail in a worker."""
    from verl.utils.config import omega_conf_to_dataclass

    for key in ("actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"):
        try:
            omega_conf_to_dataclass(OmegaConf.select(config, key))
        except Exception as error:
            root_cause = error.__cause__ or error
            raise PreflightError(f"{key}: {str(root_cause).splitlines()[0]}") from error


def check_parts(config: DictConfig) -> None:
    """Check that the parts of the run fit together, and that each finds its own keys."""
    check_tree(config)
    check_credit(config)


def check_tree(config: DictConfig) -> None:
    from verl.workers.rollout.tree_builder import policy_class

    rollout = config.actor_rollout_ref.rollout
    with _named_errors():
        tree = parts_of(rollout).tree
        if tree is not None:
            policy_class(tree).from_config(config)
    loop = rollout.agent.default_agent_loop
    if tree is not None and loop != "single_turn_agent":
        raise PreflightError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={loop} makes trajectories itself: choose "
            f"actor_rollout_ref.rollout.tree=null for it, or single_turn_agent for tree={tree}"
        )


def check_credit(config: DictConfig) -> None:
    """Check the credit, and what reads the keys of several parts."""
    from verl.trainer.distillation import is_distillation_enabled

    with _named_errors():
        hato_config(config)
        check_schedule(config)
    if is_distillation_enabled(config.get("distillation")):
        loss = parts("loss").get(config.actor_rollout_ref.actor.policy_loss.loss_mode)
        if loss and loss.fields(config.actor_rollout_ref.actor):
            raise PreflightError(
                f"distillation.enabled=true: the loss {loss.name} would take the place of the distillation's; take one "
                "of them"
            )
    check_fields(config)


def check_fields(config: DictConfig) -> None:
    """Check that the trainer computes and sends the token fields that credit and loss read."""
    estimator, mode = config.algorithm.adv_estimator, config.trainer.v1.trainer_mode
    credit = parts("credit").get(estimator)
    if credit and credit.needs and mode not in EXPLORE_TRAINERS:
        raise PreflightError(
            f"algorithm.adv_estimator={estimator} reads {', '.join(need.name for need in credit.needs)}, which "
            f"trainer.v1.trainer_mode={mode} does not send: expected {EXPLORE_TRAINERS[0]}"
        )
    computed = {need for component in parts("component").values() for need in component.computes}
    for need, key in computed_fields(config).items():
        if mode not in EXPLORE_TRAINERS:
            raise PreflightError(
                f"{key} reads {need.name}, which trainer.v1.trainer_mode={mode} does not compute: expected "
                f"{EXPLORE_TRAINERS[0]}"
            )
        if need.compute is None and need not in computed:
            raise PreflightError(
                f"{key} reads {need.name}, and nothing computes it: give the TokenField `compute`, or a component "
                "`computes`"
            )


def check_tools(config: DictConfig) -> None:
    """Let every tool show that its calls will work on this machine; each rollout worker does so on its own."""
    from verl.utils.config import omega_conf_to_dataclass

    from verl.workers.rollout.tools.tool_box import try_tools

    rollout = config.actor_rollout_ref.rollout
    if parts_of(rollout).environment != "none":
        with _named_errors():
            try_tools(omega_conf_to_dataclass(rollout).tools)


def check_engines(config: DictConfig) -> None:
    """Check that trainer and server support the config with this model; see `verl.trainer.checks.model`."""
    import torch

    model = model_json(config.actor_rollout_ref.model.path)
    with _named_errors():
        check_context(config, model)
        check_attention(config, cuda_is_here=torch.cuda.is_available())
        check_fused_kernels(config, model)
        check_prefix_tree(config, model)
        check_weight_bucket(config, model)
        check_transport(config, cuda_is_here=torch.cuda.is_available())


def check_batch_sizes(config: DictConfig) -> None:
    """Check that an epoch holds at least one batch, as upstream drops an incomplete last batch without a message."""
    rows = sum(pq.read_metadata(file).num_rows for file in local_files(config.data.train_files))
    if config.data.train_batch_size > rows and "://" not in str(config.data.train_files):
        raise PreflightError(
            f"data.train_batch_size={config.data.train_batch_size} but the training data has {rows} rows"
        )


def needed_ray_cpus(config: DictConfig) -> int:
    """The number of Ray's logical CPUs that verl 0.9.1 holds at the same time.

    They are those of TransferQueue's actors, those in the workers' bundles, and one more: an actor without `num_cpus`
    needs a CPU to be placed, and none to run.
    """
    units = OmegaConf.select(config, "transfer_queue.backend.SimpleStorage.num_data_storage_units", default=0)
    workers = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return 1 + units + CPUS_PER_WORKER * workers + CPUS_PER_SERVER * rollout_workers(config) + 1


def joins_running_cluster(config: DictConfig) -> bool:
    """Whether the config or the environment names a Ray cluster to connect to."""
    address = OmegaConf.select(config, "ray_kwargs.ray_init.address") or os.environ.get("RAY_ADDRESS")
    return address not in (None, "", "local")


def check_overlong_buffer(config: DictConfig) -> None:
    """Check that the overlong buffer is shorter than a response, as it would otherwise penalize every response."""
    key = "reward.reward_kwargs.overlong_buffer_cfg"
    buffer, budget = OmegaConf.select(config, key), config.data.max_response_length
    if buffer is not None and buffer.enable and buffer.len >= budget:
        raise PreflightError(
            f"{key}.len={buffer.len} must be below data.max_response_length={budget}, else every response is "
            f"penalized; lower it, or set {key}.enable=false"
        )


def check_ray_resources(config: DictConfig, starting: bool = True) -> None:
    """Check that Ray, if this run starts it, has enough CPUs and GPUs; a running cluster is watched instead.

    In a dry run (`starting` is false), perhaps on another machine, only the numbers in the config count.
    """
    if joins_running_cluster(config):
        return
    ray_init = config.ray_kwargs.get("ray_init", {})
    cpus, needed = ray_init.get("num_cpus"), needed_ray_cpus(config)
    if cpus is None and starting and config.trainer.nnodes == 1:
        cpus = os.cpu_count()
    if cpus is not None and cpus < needed:
        raise PreflightError(
            f"ray_kwargs.ray_init.num_cpus={cpus}, but this run holds {needed} of Ray's logical CPUs and would wait "
            f"forever: set at least {needed}, or lower transfer_queue.backend.SimpleStorage.num_data_storage_units"
        )
    gpus, wanted, own = ray_init.get("num_gpus"), config.trainer.n_gpus_per_node, rollout_workers(config)
    if gpus is not None and gpus < wanted + own:
        servers = f" + {own} of actor_rollout_ref.rollout" if own else ""
        raise PreflightError(
            f"ray_kwargs.ray_init.num_gpus={gpus} is less than trainer.n_gpus_per_node={wanted}{servers}"
        )


def check_own_machine(config: DictConfig) -> None:
    """Check that a run which starts Ray itself, on this machine alone, asks for one node, and for GPUs that it has."""
    import torch

    if joins_running_cluster(config):
        return
    nodes, gpus = config.trainer.nnodes, config.trainer.n_gpus_per_node
    if nodes > 1:
        raise PreflightError(
            f"trainer.nnodes={nodes}: no Ray cluster is named, and this machine is one node. Start a cluster and name "
            "it by RAY_ADDRESS (docs/several_nodes.md), or set NNODES=1"
        )
    if not config_asks_for_cpu(config) and gpus > torch.cuda.device_count():
        raise PreflightError(
            f"trainer.n_gpus_per_node={gpus}, and torch sees {torch.cuda.device_count()} GPUs here: set N_GPUS_PER_NODE"
        )


def check_resume_path(config: DictConfig) -> None:
    """Check that trainer.resume_from_path, if the run is to resume from it, names a checkpoint."""
    if config.trainer.resume_mode == "resume_path":
        source = Path(str(config.trainer.resume_from_path))
        if not (source / "actor").is_dir():
            raise PreflightError(f"trainer.resume_from_path={source} holds no checkpoint (no folder 'actor')")
        if not re.fullmatch(r"global_step_\d+", source.name):
            raise PreflightError(f"trainer.resume_from_path={source} must end in global_step_N: N is the step")


def check_same_method(config: DictConfig) -> None:
    """Check that the checkpoint from which the run would resume by itself is one of its own method."""
    run_dir = Path(config.trainer.default_local_dir)
    file = run_dir / METHOD_FILE
    if config.trainer.resume_mode != "auto" or not complete_steps(run_dir) or not file.exists():
        return
    earlier = json.loads(file.read_text())
    for key, value in _method(config).items():
        if earlier.get(key) != value:
            raise PreflightError(
                f"{run_dir} holds a run with {key}={earlier.get(key)}, which this one with {value} would resume: "
                "choose another trainer.experiment_name (in scripts EXPERIMENT_NAME), or trainer.resume_mode=disable"
            )


def check_resumed_step(config: DictConfig) -> None:
    """Check that the run does not end before the step of the checkpoint from which it would resume by itself."""
    trainer = config.trainer
    steps, total = complete_steps(trainer.default_local_dir), trainer.get("total_training_steps")
    if trainer.resume_mode == "auto" and steps and total and steps[-1] > total and not trainer.get("val_only"):
        try:
            check_steps_left(steps[-1], total, trainer.default_local_dir)
        except RunError as error:
            raise PreflightError(str(error)) from None


def _method(config: DictConfig) -> dict[str, str]:
    return {key: str(OmegaConf.select(config, key)) for key in METHOD}


def prepare_run_dir(config: DictConfig) -> None:
    """Make the run's folder, and make upstream resume from a complete checkpoint."""
    run_dir = Path(config.trainer.default_local_dir)
    run_dir.mkdir(parents=True, exist_ok=True)
    with replacing(run_dir / METHOD_FILE) as unfinished:
        unfinished.write_text(json.dumps(_method(config), indent=1))
    if joins_running_cluster(config):  # ray.init refuses these keys together with the address of a running cluster
        for key in {"num_cpus", "num_gpus", "object_store_memory"} & config.ray_kwargs.ray_init.keys():
            config.ray_kwargs.ray_init[key] = None
    source = None
    if config.trainer.resume_mode == "auto":
        if repaired := repair_tracker(run_dir):
            print(f"note: {repaired}", file=sys.stderr)
        source = run_dir / f"global_step_{tracked_step(run_dir)}"
    elif config.trainer.resume_mode == "resume_path":
        source = Path(config.trainer.resume_from_path)
    if source and schedule_of(config) == "sync" and (source / SAVED_ROWS).exists():
        print(
            f"note: {source.name} was saved with an asynchronous schedule; schedule=sync leaves out the prompts that "
            "were under way then (docs/resume.md)",
            file=sys.stderr,
        )
