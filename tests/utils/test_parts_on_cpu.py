"""The registry, and a method in a package of its own: its entry point makes it a choice, and it changes no file."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.fresh import python_for
from verl.utils import parts as registry
from verl.utils.parts import Compares, compares, loss_of_switch, parts, register_loss

ROOT = Path(__file__).resolve().parents[2]

STRANGER = '''
import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from verl.trainer.ppo.core_algos import agg_loss

from recipe.common.tree import Policy as Plain
from verl.trainer.ppo.credit.nodes import trajectory_advantages
from verl.utils.parts import Compares, register_credit, register_loss, register_tree
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT

SURPRISE = TokenField("surprise", "credit=surprised", compute=lambda entropy, mask: (entropy * mask, {}))


@dataclass(frozen=True, config=STRICT)
class PairKeys:
    M: int = Field(default=4, ge=1)


@register_tree(
    "pairs", "Pairs of responses", keys=PairKeys, trajectories=lambda keys: 2 * keys.M, formula="2 M", smallest={"M": 3}
)
class Pairs(Plain):
    @classmethod
    def from_config(cls, config, tokenizer=None):
        cls.part.read(config)
        return cls()


@dataclass(frozen=True, config=STRICT)
class SurprisedKeys:
    weight: float = Field(default=0.5, ge=0)

    def check(self, config):
        if self.weight > config.actor_rollout_ref.rollout.n:
            raise ValueError(f"algorithm.surprised.weight={self.weight}: above rollout.n")


@register_credit("surprised", "Outcomes by entropy", keys=SurprisedKeys, compares=Compares.GROUP, needs=(SURPRISE,))
def surprised(rewards, mask, index, epsilon, norm, keys):
    outcomes = trajectory_advantages(rewards, index, epsilon, norm)
    return outcomes.unsqueeze(-1) * (1 + keys.weight * SURPRISE.get())


@dataclass(frozen=True, config=STRICT)
class SquaredKeys:
    """Keys under actor_rollout_ref.actor.

    Args:
        squared_weight: of the squared log-ratio.
    """

    squared_weight: float = Field(default=0.5, ge=0)


@register_loss("squared", "REINFORCE with a squared penalty on the log-ratio", keys=SquaredKeys)
def squared(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, weights=None):
    losses = -advantages * log_prob + config.squared_weight * (log_prob - old_log_prob).square()
    losses = losses if weights is None else losses * weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
'''

CHECK = """
from hydra.core.config_store import ConfigStore
repo = ConfigStore.instance().repo
assert {"surprised.yaml", "grpo.yaml"} <= set(repo["credit"]) and "pairs.yaml" in repo["tree"]
load_choices()
assert {"squared_weight", "adaptive_clip", "enable_entropy_balanced_clipping"} <= set(
    repo["part_keys.yaml"].node.actor_rollout_ref.actor
)

from recipe.common.menu import about_choice, menu
assert all(words in menu() for words in ("tree=pairs", "credit=surprised", "loss=squared"))
assert "squared_weight: of the squared log-ratio." in about_choice("loss", "squared")

from omegaconf import OmegaConf
from tests.composition import Cell, config_of, take_step
from verl.trainer.checks.parts import check_parts
for cell in (("pairs", "surprised", "squared"), ("latr", "surprised", "hapo"), ("pairs", "tree_gain", "squared")):
    tree, credit, loss = cell
    take_step(Cell(tree, "none", "plain", credit, loss))
config = config_of(Cell("pairs", "none", "plain", "surprised", "squared"))
assert config.actor_rollout_ref.rollout.n == 6
check_parts(config)
for key, value, message in (
    ("algorithm.surprised.weight", 7.0, "algorithm.surprised.weight=7.0: above rollout.n"),
    ("actor_rollout_ref.rollout.n", 5, "tree=pairs grows 2 M = 6 trajectories"),
    ("trainer.v1.trainer_mode", "watched_sync", "adv_estimator=surprised reads surprise, which"),
):
    changed = OmegaConf.merge(config, OmegaConf.from_dotlist([f"{key}={value}"]))
    try:
        check_parts(changed)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(key)
print("done")
"""


def run_beside(folder: Path, code: str, module: str = STRANGER, name: str = "stranger") -> subprocess.CompletedProcess:
    """Run Python with a distribution `stranger`, whose module is this text (if empty, it is there already), installed
    in `folder` under an entry point of this name."""
    if module:
        (folder / "stranger.py").write_text(module)
    record = folder / "stranger-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[verl_exploration.parts]\n{name} = stranger\n")
    env = {**os.environ, "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(python_for(code), cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("first", ["parts('credit')", "parts('loss')", "load_choices()"])
def test_parts_of_another_package_are_choices_whoever_asks_first(tmp_path, first):
    """The credit's import leads to the trees, and these to the entry points: no order of imports may lose any."""
    done = run_beside(tmp_path, f"from verl.utils.parts import load_choices, parts\n{first}\n{CHECK}")
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]


@pytest.mark.slow
def test_an_entry_point_that_fails_is_named(tmp_path):
    done = run_beside(tmp_path, "from verl.utils.parts import parts; parts('tree')", "raise KeyError('no such thing')")
    assert "the parts of the entry point stranger (stranger): KeyError('no such thing')" in done.stderr


def test_a_name_is_registered_once_and_an_unknown_one_is_refused():
    with pytest.raises(ValueError, match="there are two parts loss=hapo"):
        register_loss("hapo", "once more")(lambda: None)
    with pytest.raises(ValueError, match="rollout.tree=no_such: expected one of .*latr"):
        registry.tree_part("no_such")


def test_traits_are_read_from_the_registry():
    assert loss_of_switch()["adaptive_clip"] == "hapo"
    assert loss_of_switch()["enable_entropy_balanced_clipping"] == "aepo"
    assert registry.tree_of_rollout_name() == {"kt": "latr", "hato": "hato", "over_generation": "over_generation"}
    assert registry.tree_of_rollout_mode() == {"sync_with_tool": "arpo"}
    assert compares("rloo") is Compares.GROUP and compares("gae") is None and compares("treerl") is Compares.NODES


def test_every_choice_is_described_and_its_smallest_settings_are_keys_of_its_own():
    for kind in ("tree", "sampler", "credit", "loss"):
        for name, part in parts(kind).items():
            assert len(part.about.split()) > 1 and part.name == name
            known = set(part.values) | {f"actor_rollout_ref.rollout.{key}" for key in ("temperature_tau",)}
            assert set(part.smallest) <= known, (kind, name)
