"""ARPO's rollout keys in upstream's typed config: the authors' YAML as it is, and errors that name the key."""

import warnings
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass

from tests.configs import composed, composed_groups
from tests.tables import table
from verl.workers.config.explore import parts_of

ARPO = Path(__file__).resolve().parents[3] / "recipe/arpo/config"


@pytest.fixture(autouse=True)
def key(monkeypatch, tmp_path):
    """Set up the keys and the corpus that the tools need; relative paths are below a folder of the test."""
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "k3y")
    monkeypatch.setenv("BRIGHTDATA_ZONE", "zone")
    monkeypatch.setenv("PWD", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "outputs/data/search_task").mkdir(parents=True)
    (tmp_path / "outputs/data/search_task/corpus.jsonl").touch()


def rollout(name: str = "arpo_trainer", *overrides: str, hardware: str = "gpu"):
    return composed(name, f"hardware={hardware}", *overrides, recipe="arpo").actor_rollout_ref.rollout


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["cpu", "gpu"])
@pytest.mark.parametrize("task", ["reasoning", "deepsearch", "search_task"])
@pytest.mark.parametrize("method", ["grpo", "arpo", "aepo"])
def test_every_method_and_task_composes_without_warnings(method, task, hardware):
    composed_groups.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*rollout mode")
        config = omega_conf_to_dataclass(rollout(f"{method}_trainer", f"task={task}", hardware=hardware))
    assert parts_of(config) == ("plain" if method == "grpo" else "arpo", "tools")
    assert config.tools.call_limit == {"reasoning": 3, "deepsearch": 6, "search_task": 3}[task]
    assert config.branch_policy == ("entropy_balanced" if method == "aepo" else "entropy")
    assert config.enable_dynamic_rollouts == (method == "aepo")
    shape = config.n, config.initial_rollouts, config.entropy_tokens
    assert shape == ((8, 4, 8) if task == "search_task" else (16, 8, 20))


def test_the_authors_yaml_works_as_it_is():
    """The keys of their README under rollout; the paths and the zone are a user's."""
    theirs = OmegaConf.create(
        """
        mode: sync_with_tool
        n: 16
        initial_rollouts: 8
        beam_size: 2
        branch_probability: 0.5
        entropy_weight: 0.2
        enable_dynamic_rollouts: false
        multi_turn: {enable: true}
        tools:
          call_limit: 3
          max_workers: 64
          timeout: 120
          retry_count: 3
          verbose_logging: true
          fail_on_error: false
          tool_instances:
            python:
              class_path: verl.workers.rollout.tools.python_tool.PythonTool
              params: {conda_path: /path/to/conda, conda_env: verl}
            search:
              class_path: verl.workers.agent.tools.search_tool.BingSearchTool
              params: {zone: mine, max_results: 10, result_length: 1000, location: cn, async_cache_write: true}
        """
    )
    config = omega_conf_to_dataclass(OmegaConf.merge(rollout(), theirs))
    assert config.tools.verbose_logging and set(config.tools.tool_instances) == {"python", "search"}


@pytest.mark.parametrize(("override", "named"), table(__file__, "wrong keys"))
def test_a_wrong_key_is_named_and_a_secret_is_not(override, named):
    with pytest.raises(Exception, match=named) as error:
        omega_conf_to_dataclass(rollout("arpo_trainer", override))
    assert "s3cr3t" not in str(error.value)
