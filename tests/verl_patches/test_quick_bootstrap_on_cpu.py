"""The bootstrap of validations gives upstream's figures."""

import importlib.util

import numpy as np
import pytest

from verl.trainer.ppo import metric_utils
from verl_patches.quick_bootstrap import bootstrap_metric


@pytest.fixture(scope="module")
def upstreams():
    """Upstream's module as it is installed, without our change."""
    spec = importlib.util.spec_from_file_location("metric_utils_as_installed", metric_utils.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n", [2, 3, 8])
def test_figures_are_upstreams(upstreams, n):
    """The data have ties, repeated and negative values, and votes that are texts."""
    assert metric_utils.bootstrap_metric is bootstrap_metric
    rng = np.random.default_rng(n)
    problems = [f"p{i}" for i in range(6) for _ in range(n)]
    infos = {
        "acc": rng.integers(0, 2, len(problems)).tolist(),
        "reward": rng.choice([-1.5, 0.1, 0.7], len(problems)).tolist(),
        "pred": rng.choice(["7", "8", ""], len(problems)).tolist(),
    }
    figures = [m.process_validation_metrics(["a"] * len(problems), problems, infos) for m in (upstreams, metric_utils)]
    assert figures[0] == figures[1]
    assert {f"best@{n}/mean", f"worst@{n}/std", f"maj@{n}/mean"} <= set(figures[1]["a"]["acc"])
