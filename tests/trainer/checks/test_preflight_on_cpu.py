"""Every mistake gets one line that names the key or the row, before Ray starts."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe.common.tiny_model import write_tiny_model
from recipe.tasks.countdown.data import CountdownConfig, write_countdown
from tests.configs import composed
from tests.forked import CPU, run_two_at_a_time, with_forks
from tests.tables import table
from tests.trainer.checks.refused import ROWS
from tests.workers.rollout.tools.mcp import mcp_library
from verl.trainer.checks.parts import check_environment, check_parts, check_typed_sections
from verl.trainer.checks.preflight import check_model_path
from verl.trainer.checks.resources.cluster import check_own_machine, check_ray_resources, needed_ray_cpus
from verl.trainer.checks.run_dir import check_resume_path, check_same_method, prepare_run_dir
from verl.trainer.checks.settle import settle


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_countdown(folder, CountdownConfig(train_size=64, test_size=8, demo_size=0))
    write_tiny_model(folder / "model")
    return folder


NAMED = {overrides: message for kind, overrides, message in ROWS if kind == "run"}


@pytest.fixture(scope="module")
def ended(inputs) -> dict[str, subprocess.CompletedProcess]:
    """Override -> the run, without DRY_RUN."""
    common = ["python", "-m", "verl.trainer.main_ppo", "--config-dir", "recipe/common/config"]
    common += ["--config-name", "grpo_trainer", "hardware=cpu", "trainer.experiment_name=preflight"]
    common += [f"trainer.default_local_dir={inputs}/run", f"actor_rollout_ref.model.path={inputs}/model"]
    common += [f"data.train_files={inputs}/train.parquet", f"data.val_files={inputs}/test.parquet"]
    env = with_forks({**os.environ, "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1"}, [CPU])
    results = run_two_at_a_time([([*common, override], env) for override in NAMED])
    return dict(zip(NAMED, results, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("override", "named"), NAMED.items())
def test_the_command_line_names_the_key(ended, override, named):
    """The run must end before Ray starts."""
    result = ended[override]
    assert result.returncode != 0
    last = "\n".join(result.stderr.strip().splitlines()[-4:])
    assert named in last, result.stderr
    assert "Started a local Ray instance" not in result.stderr


def test_model_path_may_be_a_hub_name_online_only(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_model_path("actor_rollout_ref.model.path", "Qwen/Qwen2.5-0.5B")
    check_model_path("model.path", "hdfs://cluster/models/qwen/7b")  # upstream copies it
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="does not exist"):
        check_model_path("actor_rollout_ref.model.path", "no-such-org/no-such-model")


def resources(cpus, workers, units=1):
    return OmegaConf.create(
        {
            "ray_kwargs": {"ray_init": {"num_cpus": cpus}},
            "trainer": {"nnodes": 1, "n_gpus_per_node": workers},
            "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": units}}},
        }
    )


def test_ray_cpus_are_counted(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    # sum by hand: controller 1, storage units 8, bundles of 3 for 2 workers, 1 to schedule with
    assert needed_ray_cpus(resources(24, workers=2, units=8)) == 1 + 8 + 6 + 1
    check_ray_resources(resources(16, workers=2, units=8))
    with pytest.raises(ValueError, match="num_cpus=15"):
        check_ray_resources(resources(15, workers=2, units=8))
    # Ray counts a container's limit where the config names no number; this one is 7.5 CPUs
    monkeypatch.setattr("ray._private.utils._get_docker_cpus", lambda: 7.5)
    check_ray_resources(resources(None, workers=1, units=1))
    with pytest.raises(ValueError, match="num_cpus=7, but this run holds 8 of Ray's logical CPUs"):
        check_ray_resources(resources(None, workers=1, units=3))


def test_the_checkpoint_to_resume_from_must_exist_under_its_name(tmp_path):
    (tmp_path / "global_step_20/actor").mkdir(parents=True)
    config = OmegaConf.create({"trainer": {"resume_mode": "resume_path", "resume_from_path": None}})
    for path in (f"{tmp_path}/global_step_30", None):
        config.trainer.resume_from_path = path
        with pytest.raises(ValueError, match=f"trainer.resume_from_path={path} holds no checkpoint"):
            check_resume_path(config)
    config.trainer.resume_from_path = f"{tmp_path}/global_step_20"
    check_resume_path(config)
    config.trainer.resume_from_path = (tmp_path / "global_step_20").rename(tmp_path / "kept").as_posix()
    with pytest.raises(ValueError, match="kept must end in global_step_N"):
        check_resume_path(config)


def test_another_method_does_not_go_on_with_the_checkpoints_of_a_folder(tmp_path):
    folder = f"trainer.default_local_dir={tmp_path}"
    latr = composed("explore", "hardware=cpu", "tree=latr", folder)
    prepare_run_dir(latr)
    hato = composed("explore", "hardware=cpu", "tree=hato", folder)
    check_same_method(hato)  # there is nothing to go on with
    (tmp_path / "global_step_20/actor").mkdir(parents=True)
    (tmp_path / "global_step_20/COMPLETE").touch()
    check_same_method(latr)
    with pytest.raises(ValueError, match="holds a run with actor_rollout_ref.rollout.tree=latr, which this one wi"):
        check_same_method(hato)
    hato.trainer.resume_mode = "disable"
    check_same_method(hato)
    prepare_run_dir(hato)
    hato.trainer.resume_mode = "auto"
    check_same_method(hato)


def test_relative_paths_mean_what_they_mean_to_the_user(inputs, monkeypatch):
    monkeypatch.chdir(inputs)
    overrides = ["hardware=cpu", "trainer.experiment_name=paths", "actor_rollout_ref.model.path=model"]
    (inputs / "global_step_20").mkdir()
    overrides += ["trainer.default_local_dir=runs/paths", "trainer.resume_from_path=global_step_20/"]
    overrides += ["data.train_files=train.parquet", "data.val_files=[test.parquet,s3://bucket/test.parquet]"]
    config = composed("grpo_trainer", *overrides)
    settle(config)
    assert config.actor_rollout_ref.model.path == f"{inputs}/model"
    assert config.data.train_files == f"{inputs}/train.parquet"
    assert config.trainer.resume_from_path == f"{inputs}/global_step_20"
    assert list(config.data.val_files) == [f"{inputs}/test.parquet", "s3://bucket/test.parquet"]
    metrics = config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_FILE_LOGGER_PATH
    assert metrics == f"{inputs}/runs/paths/metrics.jsonl"


# ---- parts ----

ROLLOUT = "actor_rollout_ref.rollout"


def explore(*overrides: str):
    return composed("explore", "hardware=cpu", *overrides)


def settled(model: Path, *overrides: str):
    config = explore(f"actor_rollout_ref.model.path={model}", *overrides)
    settle(config)
    check_typed_sections(config)
    check_parts(config)
    return config.actor_rollout_ref.rollout


@pytest.mark.parametrize(("tree", "name", "mode", "expected"), table(__file__, "authors' names"))
def test_the_authors_names_become_parts_on_vllm(inputs, tree, name, mode, expected):
    """Upstream's actors and servers see the config that is tested here."""
    tools = ["environment=tools", f"{ROLLOUT}.environment=null"] if expected[1] == "tools" else []
    tools += [f"tree={expected[0]}", *([] if tree else [f"{ROLLOUT}.tree=null"])]
    chosen = [f"{ROLLOUT}.{key}={value}" for key, value in (("name", name), ("mode", mode)) if value]
    rollout = settled(inputs / "model", *tools, *chosen)
    assert (rollout.tree, rollout.environment) == expected
    assert (rollout.name, rollout.mode) == ("vllm", "async")


def test_a_run_without_parts_stays_upstreams(inputs):
    rollout = settled(inputs / "model", f"{ROLLOUT}.tree=null", f"{ROLLOUT}.environment=null")
    assert (rollout.tree, rollout.environment, rollout.name, rollout.mode) == (None, None, "vllm", "async")


def test_a_tool_that_does_not_work_ends_a_run_before_it_begins():
    python = f"{ROLLOUT}.tools.tool_instances.python.params"
    with_tools = ["tree=arpo", "environment=tools"]
    check_environment(explore(*with_tools))
    with pytest.raises(ValueError, match="tool_instances.python: its calls would fail.*no_such_module"):
        check_environment(explore(*with_tools, f"+{python}.preload=[no_such_module]", f"{ROLLOUT}.tools.retry_count=1"))
    check_environment(explore("tree=latr"))


def test_a_tree_that_would_repeat_calls_of_an_mcp_server_is_refused_before_a_run():
    """The server says of no tool that it may be repeated."""
    server = f"command: [{sys.executable}, {mcp_library.__file__}], tools: [add], session: trajectory"
    entry = f"{{class_path: verl.workers.rollout.tools.mcp.tool.MCPTool, params: {{{server}}}}}"
    tools = [
        "environment=tools",
        f"~{ROLLOUT}.tools.tool_instances.python",
        f"+{ROLLOUT}.tools.tool_instances.m={entry}",
    ]
    with pytest.raises(ValueError, match="rollout.tree=arpo makes a session's calls again .*allow_repeated_calls=true"):
        check_environment(explore("tree=arpo", *tools))
    check_environment(explore("tree=plain", *tools))


def test_more_nodes_or_gpus_than_there_are_without_a_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)

    def check(profile: str, nodes: int, gpus: int, message: str = "") -> None:
        sizes = (f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}")
        config = composed("grpo_trainer", f"hardware={profile}", *sizes)
        with pytest.raises(ValueError, match=message) if message else nullcontext():
            check_own_machine(config)

    check("gpu", 1, 2)
    check("cpu", 1, 3)  # logical GPUs, of which a machine has any number
    check("gpu", 1, 8, "trainer.n_gpus_per_node=8, and torch sees 2 GPUs here")
    check("gpu", 4, 2, "trainer.nnodes=4: no Ray cluster is named")
    monkeypatch.setenv("CC", "/a/compiler")
    monkeypatch.setattr("sysconfig.get_path", lambda name: "/nowhere")
    check("gpu", 1, 2, "/nowhere/Python.h does not exist: apt-get install python3-dev")
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    check("gpu", 1, 2, "Triton needs a C compiler")
    check("cpu", 1, 2)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check("gpu", 4, 8)


READ = """
import os, sys
from omegaconf import OmegaConf
from verl.trainer.checks.resources.cluster import carry_environment
config = OmegaConf.create({"ray_kwargs": {"ray_init": {"runtime_env": {"env_vars": {"NCCL_ALGO": "Ring", "A": "1"}}}}})
carry_environment(config)
import ray
settings = OmegaConf.to_container(config.ray_kwargs.ray_init)
ray.init(address=sys.argv[1], log_to_driver=False, **settings)
names = ("HF_TOKEN", "NCCL_SOCKET_IFNAME", "NCCL_ALGO", "A", "OTHER")
values = ray.remote(lambda: [os.environ.get(name) for name in names]).remote()
print(ray.get(values), OmegaConf.to_yaml(config))
"""


@pytest.mark.slow
def test_a_running_cluster_gets_the_token_and_nccls_settings():
    """The cluster's processes are started without them."""
    cluster = "import ray, sys; info = ray.init(num_cpus=1, include_dashboard=False).address_info; "
    cluster += "print(info['address'], flush=True); sys.stdin.read()"
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    pipes = {"stdout": subprocess.PIPE, "stdin": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", cluster], env=environment, **pipes) as started:
        address = started.stdout.readline().strip()
        environment |= {"HF_TOKEN": "hf_x", "NCCL_SOCKET_IFNAME": "eth1", "NCCL_ALGO": "Tree", "OTHER": "x"}
        environment["RAY_ADDRESS"] = address
        command = [sys.executable, "-c", READ, address]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        started.stdin.close()
    assert result.stdout.startswith("['hf_x', 'eth1', 'Ring', '1', None]"), result.stderr
    assert "hf_x" not in result.stderr + result.stdout[10:]
