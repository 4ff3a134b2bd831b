"""Typed configs that add the keys of a run's parts to verl's configs of actor, rollout and algorithm.

The recipes' YAML names these classes as `_target_`."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf
from verl.trainer.config import AlgoConfig

from verl.utils.parts import credit_of, loss_of_switch, parts, tree_of_rollout_mode, tree_of_rollout_name
from verl.workers.config import RolloutConfig
from verl.workers.config.keys import ACTOR, ROLLOUT, read_keys
from verl.workers.config.prefix_tree import PrefixTreeActorConfig
from verl.workers.rollout.answer_likelihood import ANSWER_GAINS
from verl.workers.rollout.tools.tool_box import ToolsConfig

ENVIRONMENTS = ("none", "tools", "chat", "gym", "agent")


def _keys_of_parts(*kinds: str) -> Iterator[type]:
    """Yield the dataclasses whose keys stand directly in the actor's or the rollout's section."""
    for kind in kinds:
        for each in parts(kind).values():
            if each.keys is not None and getattr(each, "section", ROLLOUT) == ROLLOUT and not each.alias:
                yield each.keys


def _as_fields(name: str, *kinds: str) -> type:
    """Return a plain dataclass with the keys of all parts of these kinds; upstream's frozen configs can inherit it."""
    keys: dict[str, tuple] = {}
    for cls in _keys_of_parts(*kinds):
        defaults = cls()
        keys |= {key.name: (key.name, Any, field(default=getattr(defaults, key.name))) for key in fields(cls)}
    return make_dataclass(name, keys.values())


def _check_keys(section: Any, name: str, *kinds: str) -> None:
    """Let each part's own dataclass check its settings in a section."""
    for cls in dict.fromkeys(_keys_of_parts(*kinds)):
        read_keys(cls, {key.name: getattr(section, key.name) for key in fields(cls)}, name)


LossKeys = _as_fields("LossKeys", "loss")
RolloutKeys = _as_fields("RolloutKeys", "tree", "sampler")
# name of a section of its own in the rollout's -> the keys of the registered tree to which it belongs
TREE_SECTIONS: dict[str, type] = {
    tree.section.removeprefix(f"{ROLLOUT}."): tree.keys
    for tree in parts("tree").values()
    if tree.section.startswith(f"{ROLLOUT}.") and not tree.section.startswith(f"{ROLLOUT}.custom.")
}
TreeSections = make_dataclass("TreeSections", [(name, Any, field(default=None)) for name in TREE_SECTIONS])


@dataclass
class ExploreActorConfig(LossKeys, PrefixTreeActorConfig):  # type: ignore[valid-type, misc]
    """Upstream's FSDP actor config with the switch `use_prefix_tree` and the keys of all registered losses."""

    def __post_init__(self):
        super().__post_init__()
        _check_keys(self, ACTOR, "loss")
        mode, loss_of = self.policy_loss.loss_mode, loss_of_switch()
        chosen = parts("loss").get(mode)
        wrapped = chosen.wrapped(self) if chosen else None
        readers = (mode, wrapped.name if wrapped else mode)
        if ignored := [switch for switch, loss in loss_of.items() if getattr(self, switch) and loss not in readers]:
            raise ValueError(
                f"{ACTOR}.policy_loss.loss_mode={mode} does not know {' and '.join(ignored)}: "
                f"set it to {loss_of[ignored[0]]}, or the switch to false"
            )


CreditSections = make_dataclass(
    "CreditSections", [(name, Any, field(default=None)) for name, part in parts("credit").items() if part.keys]
)


@dataclass
class ExploreAlgoConfig(CreditSections, AlgoConfig):  # type: ignore[misc, valid-type]
    """Upstream's algorithm config with a section for each registered credit that has keys."""

    def __post_init__(self):
        for credit in parts("credit").values():
            credit.read(self)


class Parts(NamedTuple):
    """The tree policy that grows a prompt's trajectories (None for independent responses), and the environment."""

    tree: str | None
    environment: str


def parts_of(rollout) -> Parts:
    """Return what `actor_rollout_ref.rollout` chooses: by the keys `tree` and `environment`, or by `name` and `mode` as
    in the scripts of the papers' authors (`Tree.rollout_names`, `Tree.rollout_modes`)."""
    tree, by_name = rollout.get("tree", None), tree_of_rollout_name().get(rollout.name)
    if by_name and tree not in (None, by_name):
        raise ValueError(f"{ROLLOUT}.name={rollout.name} is {ROLLOUT}.tree={by_name}, and not {tree}: leave out one")
    environment = rollout.get("environment", None)
    by_mode = tree_of_rollout_mode().get(rollout.mode)
    if by_mode and environment == "none":
        raise ValueError(f"{ROLLOUT}.mode={rollout.mode} is {ROLLOUT}.environment=tools, and not none: leave out one")
    return Parts(by_name or tree or by_mode, environment or ("tools" if by_mode else "none"))


def needs_answers(config) -> str:
    """Return the `key=value` that needs reference answers; empty if none does."""
    credit = credit_of(config.algorithm.adv_estimator)
    if credit and ANSWER_GAINS in credit.needs:
        return f"algorithm.adv_estimator={credit.name}"
    return ""


@dataclass
class ExploreRolloutConfig(TreeSections, RolloutKeys, RolloutConfig):  # type: ignore[valid-type, misc]
    """Upstream's rollout config with our keys under actor_rollout_ref.rollout, also of trees and samplers."""

    _mutable_fields = RolloutConfig._mutable_fields | {"tools", *TREE_SECTIONS}

    tree: str | None = None  # a registered tree; None: see `parts_of`, else upstream's own rollout
    environment: str | None = None  # one of ENVIRONMENTS; None: see `parts_of`
    tools: ToolsConfig = field(default_factory=ToolsConfig)  # for the environments `tools` and `chat`
    # Text that closes a thought and opens an answer, before a reference answer is scored. None: ` The answer is `, or
    # with tools `</think><answer>\\boxed{`.
    answer_closing: str | None = None
    group_timeout: float | None = None  # seconds after which a prompt's group fails, its wait for the engine included

    def __post_init__(self):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unknown rollout mode")
            RolloutConfig.__post_init__(self)
        _check_keys(self, ROLLOUT, "tree", "sampler")
        for name, cls in TREE_SECTIONS.items():
            setattr(self, name, _section(name, cls, getattr(self, name) or {}))
        chosen = parts_of(self)
        has_tools = chosen.environment not in ("gym", "agent")  # a script's config may have some, with keys for APIs
        self.tools = _section("tools", ToolsConfig, self.tools if has_tools else {})
        if chosen.environment not in ENVIRONMENTS:
            raise ValueError(f"{ROLLOUT}.environment={self.environment}: expected one of {', '.join(ENVIRONMENTS)}")
        if chosen != (None, "none") and self.name not in ("vllm", *tree_of_rollout_name()):
            raise ValueError(f"{ROLLOUT}.name={self.name}: {ROLLOUT}.tree={chosen.tree} is grown on name=vllm")
        if chosen.environment == "chat":
            from verl.workers.rollout.chat.calls import check_format  # imports upstream's agent loop

            check_format(self.multi_turn.format)
            self.tools = with_upstream_tools(self.tools, self.multi_turn)
        if chosen.environment != "none" and chosen.tree is None:
            raise ValueError(f"{ROLLOUT}.environment={chosen.environment} needs {ROLLOUT}.tree, such as plain")
        if chosen.environment in ("tools", "chat"):
            self._check_tools(chosen.environment)

    def _check_tools(self, environment: str) -> None:
        if not self.tools.tool_instances:
            raise ValueError(f"{ROLLOUT}.environment={environment} needs {ROLLOUT}.tools.tool_instances")
        for name, instance in self.tools.tool_instances.items():
            if (instance.get("params") or {}).get("api_key"):
                raise ValueError(
                    f"{ROLLOUT}.tools.tool_instances.{name}.params.api_key: upstream prints and logs the whole config; "
                    "leave the key out and export BRIGHTDATA_API_KEY on every node"
                )


def with_upstream_tools(tools: ToolsConfig, multi_turn) -> ToolsConfig:
    """Return the tools' config with entries for the tools that upstream's keys of `multi_turn` name."""
    entries: dict[str, Any] = {}
    if path := _file(multi_turn, "tool_config_path"):
        listed = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
        if not isinstance(listed, dict) or not isinstance(listed.get("tools"), list):
            key = f"{ROLLOUT}.multi_turn.tool_config_path={path}"
            raise ValueError(f"{key}: expected a list `tools` with class_name, config and tool_schema")
        for number, tool in enumerate(listed["tools"]):
            params = {"config": tool.get("config"), "tool_schema": tool.get("tool_schema")}
            entries[f"tool_config_path_{number}"] = {"class_path": tool.get("class_name"), "params": params}
    if path := _file(multi_turn, "function_tool_path"):
        class_path = "verl.workers.rollout.tools.upstream_tool.FunctionTools"
        entries["function_tool_path"] = {"class_path": class_path, "params": {"path": path}}
    values = {key.name: getattr(tools, key.name) for key in fields(tools)}
    return _section("tools", ToolsConfig, values | {"tool_instances": {**tools.tool_instances, **entries}})


def _file(multi_turn, key: str) -> str | None:
    path = multi_turn.get(key)
    if path and not Path(path).is_file():
        raise ValueError(f"{ROLLOUT}.multi_turn.{key}={path}: there is no such file")
    return path


def _section(name: str, cls: type, values):
    """Return `values` as an instance of `cls`; `values` may be one already."""
    return values if isinstance(values, cls) else read_keys(cls, dict(values), f"{ROLLOUT}.{name}")
