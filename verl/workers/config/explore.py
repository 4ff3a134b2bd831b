"""What the parts of a run add to verl's typed actor and rollout configs; the recipes' YAML names these classes as
`_target_`."""

import warnings
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from verl.workers.config import RolloutConfig
from verl.workers.config.policy_keys import ROLLOUT, check_log_probs
from verl.workers.config.prefix_tree import PrefixTreeActorConfig
from verl.workers.rollout.tools.tool_box import ToolsConfig
from verl.workers.rollout.trees.arpo.config import ARPOConfig
from verl.workers.rollout.trees.latr.config import KTConfig

SECTION = "actor_rollout_ref.actor"
# the authors' names: LATR and the notes on HATO call the tree a rollout, ARPO calls rollouts with tools a mode
TREE_OF_NAME = {"kt": "latr", "hato": "hato", "over_generation": "over_generation"}
TOOL_MODE = "sync_with_tool"
ENVIRONMENTS = ("none", "tools")
# switch -> the policy_loss.loss_mode that knows it
LOSS_OF = {
    "adaptive_clip": "hapo",
    "adaptive_advantage": "hapo",
    "enable_entropy_balanced_clipping": "aepo",
    "enable_entropy_balanced_advantage": "aepo",
}


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{SECTION}.{name}={value}: expected a number from {low} to {high}")


@dataclass
class ExploreActorConfig(PrefixTreeActorConfig):
    """Upstream's FSDP actor config, its switch `use_prefix_tree`, and what HAPO's and AEPO's losses add under
    actor_rollout_ref.actor.

    Args:
        adaptive_clip: HAPO: clip ranges follow each token's normalized entropy h.
        clip_alpha: how far: eps (1 + clip_alpha |h|).
        adaptive_advantage: HAPO: redistribute advantages by h.
        adv_beta: how far: A (1 + adv_beta h); at most 1, so that no advantage changes its sign.
        entropy_pivot: HAPO: quantile of the batch's log-entropies where h is 0.
        enable_entropy_balanced_clipping: AEPO: tokens above the upper clip keep a gradient.
        enable_entropy_balanced_advantage: AEPO: advantages grow with the standardized entropy z.
        entropy_advantage_coef: how far: A (1 + entropy_advantage_coef z), from 0 to 1.
    """

    adaptive_clip: bool = False
    clip_alpha: float = 1.0
    adaptive_advantage: bool = False
    adv_beta: float = 1.0
    entropy_pivot: float = 0.8
    enable_entropy_balanced_clipping: bool = False
    enable_entropy_balanced_advantage: bool = False
    entropy_advantage_coef: float = 0.2

    def __post_init__(self):
        super().__post_init__()
        _check_range("entropy_pivot", self.entropy_pivot, 0.0, 1.0)
        _check_range("adv_beta", self.adv_beta, 0.0, 1.0)
        _check_range("entropy_advantage_coef", self.entropy_advantage_coef, 0.0, 1.0)
        low = self.clip_ratio_low if self.clip_ratio_low is not None else self.clip_ratio
        if self.adaptive_clip and (self.clip_alpha < 0 or low * (1 + self.clip_alpha) >= 1):
            raise ValueError(
                f"{SECTION}.clip_alpha={self.clip_alpha}: expected at least 0, and clip_ratio_low (1 + clip_alpha) "
                f"below 1, else nothing is clipped; clip_ratio_low is {low}"
            )
        mode = self.policy_loss.loss_mode
        if ignored := [switch for switch, loss in LOSS_OF.items() if getattr(self, switch) and loss != mode]:
            raise ValueError(
                f"{SECTION}.policy_loss.loss_mode={mode} does not know {' and '.join(ignored)}: "
                f"set it to {LOSS_OF[ignored[0]]}, or the switch to false"
            )


class Parts(NamedTuple):
    """What grows a prompt's trajectories: the tree policy, None for independent responses; and the environment."""

    tree: str | None
    environment: str


def parts_of(rollout) -> Parts:
    """Of `actor_rollout_ref.rollout`, in whichever names it is said.

    Raises:
        ValueError: `name` and `tree`, or `mode` and `environment`, say different things.
    """
    tree, by_name = rollout.get("tree", None), TREE_OF_NAME.get(rollout.name)
    if by_name and tree not in (None, by_name):
        raise ValueError(f"{ROLLOUT}.name={rollout.name} is {ROLLOUT}.tree={by_name}, and not {tree}: leave out one")
    environment = rollout.get("environment", None)
    if rollout.mode == TOOL_MODE:
        if environment == "none":
            raise ValueError(f"{ROLLOUT}.mode={TOOL_MODE} is {ROLLOUT}.environment=tools, and not none: leave out one")
        return Parts(by_name or tree or "arpo", environment or "tools")
    return Parts(by_name or tree, environment or "none")


@dataclass
class ExploreRolloutConfig(ARPOConfig, RolloutConfig):
    """Upstream's rollout config, and ours under actor_rollout_ref.rollout, ARPO's keys (`ARPOConfig`) among them.

    Args:
        tree: the policy that grows a prompt's trajectories, a module of verl.workers.rollout.trees; None: by `name` and
            `mode` in the authors' words, else independent responses, or upstream's agent loops.
        environment: `none` or `tools`; None: by `mode`, else none.
        kt: LATR's keys (`KTConfig`).
        tools: the environment's (`ToolsConfig`).
        group_timeout: seconds from a prompt's submission after which its group fails; None: no limit.
        adaptive_temperature: HAPO: sample training rollouts at T (1 + temperature_tau h); never validation.
        temperature_tau: in [0, 1); 0 is off.
    """

    _mutable_fields = RolloutConfig._mutable_fields | {"kt", "tools"}

    tree: str | None = None
    environment: str | None = None
    kt: KTConfig = field(default_factory=KTConfig)
    tools: ToolsConfig = field(default_factory=ToolsConfig)
    group_timeout: float | None = None
    adaptive_temperature: bool = False
    temperature_tau: float = 0.05

    def __post_init__(self):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unknown rollout mode")
            RolloutConfig.__post_init__(self)
        ARPOConfig.__post_init__(self)
        self.kt = _section("kt", KTConfig, self.kt)
        self.tools = _section("tools", ToolsConfig, self.tools)
        parts = parts_of(self)
        if parts.environment not in ENVIRONMENTS:
            raise ValueError(f"{ROLLOUT}.environment={self.environment}: expected one of {', '.join(ENVIRONMENTS)}")
        if parts != (None, "none") and self.name not in ("vllm", *TREE_OF_NAME):
            raise ValueError(f"{ROLLOUT}.name={self.name}: {ROLLOUT}.tree={parts.tree} is grown on name=vllm")
        if parts.environment == "tools":
            self._check_tools()
        if parts.tree == "latr":
            self._check_latr()
        if parts.tree == "arpo":
            top_k = self.entropy_top_k if self.branch_policy != "never" else 0
            check_log_probs(self, f"{ROLLOUT}.entropy_top_k", top_k)
        if self.adaptive_temperature:
            self._check_sampler()
        if not 0 <= self.temperature_tau < 1:
            raise ValueError(f"{ROLLOUT}.temperature_tau={self.temperature_tau}: expected a number in [0, 1)")

    def _check_latr(self) -> None:
        plain = self.temperature == 1 and self.top_p == 1 and self.top_k in (-1, 0)
        if self.kt.sample_nk != "none" and not plain:
            raise ValueError(
                f"{ROLLOUT}.kt.sample_nk={self.kt.sample_nk} needs temperature=1, top_p=1, top_k=-1: the server "
                "reports top log-probs after them, and branches open by raw probabilities"
            )
        check_log_probs(self, f"{ROLLOUT}.kt.max_n_branch_per_token", self.kt.max_n_branch_per_token)

    def _check_tools(self) -> None:
        if parts_of(self).tree is None:
            raise ValueError(
                f"{ROLLOUT}.environment=tools needs {ROLLOUT}.tree; plain: trajectories that do not branch"
            )
        if not self.tools.tool_instances:
            raise ValueError(f"{ROLLOUT}.environment=tools needs {ROLLOUT}.tools.tool_instances")
        for name, instance in self.tools.tool_instances.items():
            if (instance.get("params") or {}).get("api_key"):
                raise ValueError(
                    f"{ROLLOUT}.tools.tool_instances.{name}.params.api_key: upstream prints and logs the whole config; "
                    "leave the key out and export BRIGHTDATA_API_KEY on every node"
                )

    def _check_sampler(self) -> None:
        if self.temperature != 1:
            raise ValueError(
                f"{ROLLOUT}.adaptive_temperature needs {ROLLOUT}.temperature=1, not {self.temperature}: the "
                "statistics are of entropies at that temperature, the sampler's entropies of raw logits"
            )


def _section(name: str, cls: type, values):
    """The typed section of these values.

    Raises:
        ValueError: there is no such key.
    """
    if isinstance(values, cls):
        return values
    known = {key.name for key in fields(cls)}
    if unknown := sorted(set(values) - known):
        raise ValueError(f"{ROLLOUT}.{name} has no key {', '.join(unknown)}; known: {sorted(known)}")
    return cls(**dict(values))
