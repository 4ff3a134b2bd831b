"""A method in a package of its own: it is found by its entry point, works with all other parts, and changes no file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.utils import parts as registry
from verl.utils.parts import Compares, compares, loss_of_switch, parts, register_loss

ROOT = Path(__file__).resolve().parents[2]

STRANGER = '''
"""Fixed-length pieces: M trajectories, each continued N times from its middle; a credit by surprise; a squared loss."""

import random

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from verl.trainer.ppo.core_algos import agg_loss

from verl.trainer.ppo.credit.nodes import batch_nodes, node_values, trajectory_advantages
from verl.utils.parts import Compares, register_credit, register_loss, register_tree
from verl.utils.token_fields import TokenField
from verl.workers.config.keys import STRICT
from verl.workers.rollout.engines.interface import gather_or_cancel
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS, TOOL, first_tokens
from verl.workers.rollout.tree_builder import BranchPolicy, Path, derived_seed


@dataclass(frozen=True, config=STRICT)
class PieceKeys:
    """Keys under actor_rollout_ref.rollout.custom.pieces.

    Args:
        M: trajectories from the prompt.
        N: continuations of each.
    """

    M: int = Field(default=4, ge=1)
    N: int = Field(default=1, ge=0)


@register_tree(
    "pieces", "Trajectories are continued from their middle", keys=PieceKeys,
    trajectories=lambda keys: keys.M * (1 + keys.N), formula="M (1 + N)", smallest={"M": 3}, scaled_by="M",
)
class Policy(BranchPolicy):
    async def grow(self, builder, n):
        seeds = random.Random(builder.seed)
        whole = await gather_or_cancel(*(builder.finish(Path(), seeds.getrandbits(31)) for _ in range(self.keys.M)))
        for number, segments in enumerate(whole):
            builder.tree.leaves.append(builder.tree.insert(None, segments))
            head = first_tokens(segments, sum(len(segment.token_ids) for segment in segments) // 2)
            for i in range(self.keys.N):
                rest = await builder.finish(Path.of(head), derived_seed(builder.seed, number, i))
                builder.tree.leaves.append(builder.tree.insert(None, [*head, *rest]))


SURPRISE = TokenField("surprise", "credit=surprised", compute=lambda entropy, mask: (
    entropy * mask, {"surprise/mean": (entropy * mask).mean().item()}
))


@dataclass(frozen=True, config=STRICT)
class SurprisedKeys:
    """Keys under algorithm.surprised.

    Args:
        weight: factor of the surprise.
    """

    weight: float = Field(default=1.0, ge=0)

    def check(self, config) -> None:
        if self.weight > config.actor_rollout_ref.rollout.n:
            raise ValueError(f"algorithm.surprised.weight={self.weight}: above rollout.n")


@register_credit(
    "surprised", "Values by entropy", keys=SurprisedKeys, smallest={"weight": 0.5}, compares=Compares.NODES,
    needs=(SEGMENT_IDS, SURPRISE),
)
def surprised(rewards, mask, index, epsilon, norm, keys):
    nodes = batch_nodes(index, mask)
    values = node_values(nodes, trajectory_advantages(rewards, index, epsilon, norm)).value
    return nodes.to_tokens(values) * (1 + keys.weight * SURPRISE.get())


@dataclass(frozen=True, config=STRICT)
class SquaredKeys:
    """Keys under actor_rollout_ref.actor.

    Args:
        squared_weight: of the squared log-ratio.
    """

    squared_weight: float = Field(default=0.5, ge=0)


@register_loss("squared", "REINFORCE with a squared penalty on the log-ratio", keys=SquaredKeys)
def squared(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config=None, weights=None):
    ratio = log_prob - old_log_prob
    losses = -advantages * log_prob + config.squared_weight * ratio.square()
    losses = losses if weights is None else losses * weights
    return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}
'''

CHECK = """
import sys
import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.checks.parts import check_typed_sections
from verl.utils.token_fields import FIELDS
from verl.workers.rollout.trajectory_tree import SEGMENT_IDS
sys.path.insert(0, "tests")
import composition
from composition import Cell, CREDITS, LOSSES, TREES, refusal, take_step
from omegaconf import OmegaConf
from recipe.common.menu import about_choice, menu
from verl.utils.parts import parts
from verl.evaluation.exploration.plan import _scale_trees

assert "pieces" in TREES and "surprised" in CREDITS and "squared" in LOSSES
text = menu()
for words in ("tree=pieces", "credit=surprised", "loss=squared"):
    assert words in text, words
assert "squared_weight: of the squared log-ratio." in about_choice("loss", "squared")
assert "weight: factor of the surprise." in about_choice("credit", "surprised")
steps = 0
usual, new = {"plain", "none", "grpo", "vanilla"}, {"pieces", "surprised", "squared"}
for cell in composition.cells():
    # each of the three with each other part
    if new & set(cell) and len(set(cell) - new - usual) <= 1 and refusal(cell) is None:
        take_step(cell)
        steps += 1
print("STEPS", steps)

config = composition.config_of(Cell("pieces", "none", "plain", "surprised", "squared")).copy()
assert config.actor_rollout_ref.rollout.n == 6 and config.actor_rollout_ref.actor.squared_weight == 0.5
def refused(change, message):
    changed = config.copy()
    for key, value in change.items():
        OmegaConf.update(changed, key, value, force_add=True)
    try:
        check_typed_sections(changed)
        composition.check_parts(changed)
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(change)
refused({"trainer.v1.trainer_mode": "watched_sync"}, "adv_estimator=surprised reads segment_ids, surprise, which")
refused({"algorithm.rollout_correction.bypass_mode": True}, "which algorithm.adv_estimator=surprised needs")
refused({"actor_rollout_ref.rollout.n": 5}, "tree=pieces grows M (1 + N) = 6 trajectories")
assert config.algorithm.surprised.weight == 0.5
refused({"algorithm.surprised.weight": 7.0}, "algorithm.surprised.weight=7.0: above rollout.n")
weights = {}
for weight in (0.0, 0.5):
    with SEGMENT_IDS.bound(torch.tensor([[0], [1]])), FIELDS["surprise"].bound(torch.tensor([[2.0], [0.0]])):
        algorithm = {"surprised": {"weight": weight}, "norm_adv_by_std_in_grpo": False}
        arguments = torch.tensor([[1.0], [0.0]]), torch.ones(2, 1), np.array(["p", "p"])
        weights[weight] = get_adv_estimator_fn("surprised")(*arguments, config=algorithm)[0].flatten().tolist()
assert weights == {0.0: [0.5, -0.5], 0.5: [1.0, -0.5]}, weights
config.n = 8
config.actor_rollout_ref.rollout.custom.pieces.M = None
for other in parts("tree").values():
    if other.scaled_by and other.name != "pieces":
        OmegaConf.update(config, f"{other.section}.{other.scaled_by}", 1, force_add=True)
_scale_trees(config)
assert config.actor_rollout_ref.rollout.custom.pieces.M == 4
"""

SUITES = '''
"""What the suites ask of trees, credits and losses, of the parts of this package."""

import pytest

from tests.conformance.%(kind)s import *  # noqa: F403


@pytest.fixture(params=["%(name)s"])
def %(fixture)s(request):
    return request.param
'''

RUN_SUITES = """
import sys
import pytest
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--import-mode=importlib", *sys.argv[1:]]))
"""


def run_beside(
    folder: Path, code: str, module: str = STRANGER, name: str = "stranger", arguments=()
) -> subprocess.CompletedProcess:
    """Run Python with a package `stranger`, whose text is `module` (if empty, it is there already), installed in
    `folder` under an entry point of this name."""
    if module:
        (folder / "stranger.py").write_text(module)
    record = folder / "stranger-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (record / "entry_points.txt").write_text(f"[verl_exploration.parts]\n{name} = stranger\n")
    env = {**os.environ, "VERL_PLATFORM": "cpu", "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{folder}:{ROOT}"}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.slow
def test_a_method_from_outside_takes_steps_with_every_other_part(tmp_path):
    done = run_beside(tmp_path, CHECK)
    assert done.returncode == 0, done.stderr[-3000:]
    n_steps = int(done.stdout.split("STEPS ")[1])
    n_parts = [len(parts(kind)) for kind in ("tree", "credit", "loss")]
    assert n_steps > 1.5 * sum(n_parts), "few combinations of two parts are refused"


@pytest.mark.slow
def test_a_package_from_outside_runs_the_suites_for_its_parts(tmp_path):
    kinds = {"trees": ("tree", "pieces"), "credits": ("credit", "surprised"), "losses": ("loss", "squared")}
    files = []
    for kind, (fixture, name) in kinds.items():
        files.append(tmp_path / f"test_{kind}.py")
        files[-1].write_text(SUITES % {"kind": kind, "fixture": fixture, "name": name})
    done = run_beside(tmp_path, RUN_SUITES, arguments=map(str, files))
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("first", ["parts('credit')", "parts('loss')", "load_choices()"])
def test_the_order_of_imports_does_not_matter(tmp_path, first):
    """Whoever asks for parts first: the credit imports what leads to the trees, and these to the entry points."""
    code = (
        f"from verl.utils.parts import load_choices, parts\n{first}\n"
        + """
from hydra.core.config_store import ConfigStore
repo = ConfigStore.instance().repo
assert {"surprised.yaml", "grpo.yaml"} <= set(repo["credit"]) and "pieces.yaml" in repo["tree"]
load_choices()
assert {"squared_weight", "adaptive_clip", "enable_entropy_balanced_clipping"} <= set(
    repo["part_keys.yaml"].node.actor_rollout_ref.actor
)
"""
    )
    done = run_beside(tmp_path, code)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_an_entry_point_that_fails_is_named(tmp_path):
    done = run_beside(tmp_path, "from verl.utils.parts import parts; parts('tree')", "raise KeyError('no such thing')")
    assert "the parts of the entry point stranger (stranger): KeyError('no such thing')" in done.stderr


def test_a_name_is_registered_once():
    assert "hapo" in parts("loss")
    with pytest.raises(ValueError, match="there are two parts loss=vanilla"):
        registry.describe_loss("vanilla", "once more")
    with pytest.raises(ValueError, match="there are two parts loss=hapo"):
        register_loss("hapo", "once more")(lambda: None)


def test_lookups_of_the_registry():
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
