"""The registry of the parts that make up a run. A part is one file, which registers everything that others read of it.

    tree        register_tree        which tokens are generated?
    sampler     register_sampler     how is a token drawn?
    credit      register_credit      which token gets which advantage?
    loss        register_loss        how far may the policy move?
    component   register_component   what happens between the phases of a training step?
    proposal    register_proposal    which values of a tree's keys fit a model? (scripts/explore.sh)
    task        register_task        what is learnt? (verl/utils/tasks.py)
    evaluation  register_benchmark   what is asked to evaluate it? (verl/evaluation/questions/benchmarks.py)

All of a method lies in its folder below `recipe/`, and the name of a module there is its kind: `parts("tree")` imports
`recipe/<method>/tree.py` and `recipe/compared/<method>/tree.py`, and nothing of other kinds, so that a rollout worker
loads no trainer. Then it imports what other packages name in the entry-point group `verl_exploration.parts`: a module,
or a package with such modules. A registered tree, sampler, credit or loss becomes a choice for Hydra (`tree=<name>`)
without a file: its config values are a node of Hydra's `ConfigStore`.

    [project.entry-points."verl_exploration.parts"]
    my_method = "my_package"
"""

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from enum import Enum
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from verl.utils.token_fields import RewardField, TokenField
from verl.workers.config.keys import ACTOR, ROLLOUT, check_trajectories, read_keys
from verl.workers.config.schedule import EXPLORE_TRAINERS

KINDS = ("tree", "sampler", "credit", "loss", "component", "proposal", "task", "evaluation")
ENTRY_POINTS = "verl_exploration.parts"
T = TypeVar("T")


class Compares(Enum):
    """The things that an advantage estimator compares a trajectory with."""

    GROUP = "group"  # its prompt's other trajectories: equal outcomes, or a lone trajectory, give advantage 0
    # the same, but a later step, such as whitening over the batch, may give equal outcomes an advantage
    GROUP_THEN_MORE = "group then more"
    NODES = "nodes"  # nodes of the prompt's tree; the estimator itself gives 0 where there is nothing to compare


GROUP_COMPARISONS = (Compares.GROUP, Compares.GROUP_THEN_MORE)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A registered choice, such as `plain` for the tree."""

    name: str  # the choice, as in `tree=plain`
    about: str  # a sentence for the menu
    requires: str = ""  # further requirements of a run, for the menu
    # a caveat for users who compare its runs with others, shown before each run; or a function of the config for it
    warning: str | Callable[[DictConfig], str] = ""
    # config values that the choice sets: key from the config's root, with dots -> value
    values: Mapping[str, Any] = field(default_factory=dict)
    # config values, in addition to `values`, with which a test takes a small step
    smallest: Mapping[str, Any] = field(default_factory=dict)
    alias: bool = False  # another name of an older choice, or upstream's own: not in the menu, the diagnosis and tests
    # checks a run's settled config beyond the keys, and raises a ValueError that names the key
    checks: Callable[[DictConfig], None] | None = None

    def check(self, config: DictConfig) -> None:
        """Check a run's settled config; raise a ValueError that names the first wrong key."""
        if self.checks is not None:
            self.checks(config)

    def node(self) -> DictConfig:
        """Return `values` as a config."""
        return nested(self.values)


@dataclass(frozen=True, kw_only=True)
class Tree(Part):
    """A way to grow a prompt's trajectories. A diagnosis (scripts/explore.sh) compares trees at a small `rollout.n`."""

    policy: type  # the `BranchPolicy`
    keys: type | None = None  # dataclass of its settings
    section: str = ""  # section of a config that holds the settings
    # number of trajectories that a policy with these keys grows, if `rollout.n` is not free; as a formula for messages
    trajectories: Callable[[Any], int] | None = None
    formula: str = ""
    # In a diagnosis, this key gets the largest value with which at most `n` trajectories are grown, and `diagnosis` has
    # the values by which other keys differ.
    scaled_by: str = ""
    diagnosis: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)  # values by which it differs from the tree that it extends
    forks_at_results: bool = False  # forks after a tool's result, so that a diagnosis without tools leaves it out
    reads_rewards: bool = False  # reads rewards of trajectories while it grows
    learns: bool = False  # a trainer component learns a model that it needs
    # values of `rollout.name`, and with tools of `rollout.mode`, by which scripts of the paper's authors choose it
    rollout_names: tuple[str, ...] = ()
    rollout_modes: tuple[str, ...] = ()

    def read(self, config: DictConfig) -> Any:
        """Return the checked settings from a run's config, an instance of `keys`; None for a tree without settings. A
        ValueError names a key with a wrong type or range, or a `rollout.n` that is not what the policy grows."""
        if self.keys is None:
            return None
        values = OmegaConf.select(config, self.section) or {}
        keys: Any = read_keys(self.keys, _own(values, self.keys) if self.section == ROLLOUT else values, self.section)
        if self.trajectories is not None:
            check_trajectories(config, self.name, self.formula, self.trajectories(keys))
        return keys

    def check(self, config: DictConfig) -> None:
        """See `Part.check`. The run must also have no other agent loop, and a trainer and rewards as the tree needs."""
        self.policy.from_config(config)  # type: ignore[attr-defined]
        rollout, reward = config.actor_rollout_ref.rollout, config.reward.reward_model
        if (loop := rollout.agent.default_agent_loop) != "single_turn_agent":
            raise ValueError(
                f"{ROLLOUT}.agent.default_agent_loop={loop} makes trajectories itself: choose "
                f"{ROLLOUT}.tree=null for it, or single_turn_agent for tree={self.name}"
            )
        if self.learns and (mode := config.trainer.v1.trainer_mode) not in EXPLORE_TRAINERS:
            raise ValueError(
                f"trainer.v1.trainer_mode={mode}: the trainer learns what tree={self.name} needs: expected "
                f"{EXPLORE_TRAINERS[0]}"
            )
        if self.reads_rewards and reward.enable and not reward.enable_resource_pool:
            raise ValueError(
                f"reward.reward_model.enable_resource_pool=false: tree={self.name} needs rewards during the rollout: "
                "expected true, or no reward model"
            )
        super().check(config)


@dataclass(frozen=True, kw_only=True)
class Sampler(Part):
    """A way to draw tokens."""

    keys: type | None = None  # dataclass of its settings, which stand in `rollout`
    is_on: Callable[[Any], bool] = lambda rollout: False  # whether a `rollout` section asks for it
    needs: tuple[TokenField, ...] = ()  # fields that the trainer computes to derive the next step's settings


@dataclass(frozen=True, kw_only=True)
class Credit(Part):
    """An advantage estimator."""

    compares: Compares | None = None  # the things that it compares a trajectory with; None: none of `Compares`
    # dataclass of its settings, which stand in `algorithm.<name>`; see `check_keys`
    keys: type | None = None
    needs: tuple[TokenField, ...] = ()  # token fields that it reads, which only this project's trainer sends
    reward_fields: tuple[RewardField, ...] = ()  # numbers of the reward function that it reads beside the rewards

    def read(self, algorithm: Any) -> Any:
        """Return the settings in a run's section `algorithm`, which may be None; None for a credit without settings."""
        if self.keys is None:
            return None
        return read_keys(self.keys, (algorithm or {}).get(self.name), f"algorithm.{self.name}")

    def check(self, config: DictConfig) -> None:
        """See `Part.check`. The run's trainer must also send the fields that the credit needs."""
        check_keys(self.read(config.algorithm), config)
        mode = config.trainer.v1.trainer_mode
        needs = [need.name for need in (*self.needs, *self.reward_fields)]
        if needs and mode not in EXPLORE_TRAINERS:
            raise ValueError(
                f"algorithm.adv_estimator={self.name} reads {', '.join(needs)}, which trainer.v1.trainer_mode={mode} "
                f"does not send: expected {EXPLORE_TRAINERS[0]}"
            )
        n = config.actor_rollout_ref.rollout.n
        if self.compares is not None and n == 1 and not config.trainer.get("val_only"):
            raise ValueError(
                f"actor_rollout_ref.rollout.n=1 with algorithm.adv_estimator={self.name}, which compares responses to "
                "the same prompt: expected at least 2"
            )
        super().check(config)


@dataclass(frozen=True, kw_only=True)
class Loss(Part):
    """A policy loss."""

    keys: type | None = None  # dataclass of its settings, which stand in `actor`; see `check_keys`
    # boolean key that no other loss has -> the token field that the loss reads if the key is true; None if none
    switches: Mapping[str, TokenField | None] = field(default_factory=dict)
    needs: tuple[TokenField, ...] = ()  # token fields that it always reads
    # whether a token's loss and gradient grow with the size of its advantage: 0 where it is 0, so that rows without an
    # advantage need no computation
    proportional: bool = False
    wraps: str = ""  # key of `actor` that names the loss that this one calls

    def fields(self, actor) -> tuple[TokenField, ...]:
        """Return the token fields that the loss, and one that it calls, read under this `actor` section."""
        switched = [field for switch, field in self.switches.items() if field is not None and actor.get(switch)]
        wrapped = self.wrapped(actor)
        return tuple(dict.fromkeys([*self.needs, *switched, *(wrapped.fields(actor) if wrapped else ())]))

    def check(self, config: DictConfig) -> None:
        """See `Part.check`. The keys of all losses stand in the same section, so that every run checks all of them."""
        if self.keys is not None:
            check_keys(read_keys(self.keys, _own(config.actor_rollout_ref.actor, self.keys), ACTOR), config)
        super().check(config)

    def wrapped(self, actor) -> "Loss | None":
        """Return the loss that this one calls under this `actor` section; None if it calls none."""
        return parts("loss").get(actor.get(self.wraps)) if self.wraps else None


def check_keys(keys: Any, config: DictConfig) -> None:
    """Call the method `check` of a part's settings, if there is one, with the whole config: it may raise ValueError."""
    if hasattr(keys, "check"):
        keys.check(config)


def _own(section: Mapping, keys: type) -> dict[str, Any]:
    """Return the values of a part's keys in a section that has other keys, too."""
    return {key.name: section[key.name] for key in fields(keys) if key.name in section}


def _below(section: str, values: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return values with their keys as paths from the config's root."""
    return {f"{section}.{key}": value for key, value in (values or {}).items()}


_registered: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}


def parts(kind: str) -> Mapping[str, Any]:
    """Return the registered parts of a kind by their names, in alphabetical order."""
    _load(kind)
    return dict(sorted(_registered[kind].items()))


def load_choices() -> None:
    """Register all choices, so that Hydra knows them. Call this before a config is composed."""
    if _loads.depth:  # A part's own import has led here; `_load` calls this again once all parts are registered.
        _loads.choices = True
        return
    for kind in ("tree", "sampler", "credit", "loss", "task"):
        _load(kind)
    defaults: dict[str, Any] = {}
    for section, kind in ((ACTOR, "loss"), (ROLLOUT, "sampler")):
        for each in _registered[kind].values():
            if each.keys is not None:
                defaults |= _below(section, asdict(each.keys()))
    ConfigStore.instance().store(name="part_keys", node=nested(defaults), package="_global_")
    ConfigStore.instance().store(name="diagnosis_trees", node=_trees_of_a_diagnosis(), package="_global_")


def _trees_of_a_diagnosis() -> DictConfig:
    """Return the keys of all trees, and for each tree the changes of `rollout` with which a diagnosis grows it."""
    values: dict[str, Any] = {}
    for name, tree in sorted(_registered["tree"].items()):
        if tree.alias or name == "plain":  # A diagnosis has its own rows for `plain`, one for each temperature.
            continue
        if not tree.variant:
            values |= {key: value for key, value in tree.values.items() if key != f"{ROLLOUT}.n"}
            values |= _below(tree.section, tree.diagnosis)
            values |= {f"{tree.section}.{tree.scaled_by}": None} if tree.scaled_by else {}
        group = "tool_policies" if tree.forks_at_results else "policies"
        rollout_changes = {"tree": tree.values[f"{ROLLOUT}.tree"]}
        rollout_changes |= {key.removeprefix(f"{ROLLOUT}."): value for key, value in tree.variant.items()}
        values[f"{group}.{name}"] = rollout_changes
    values.pop(f"{ROLLOUT}.tree")
    return nested(values)


@dataclass
class _Loads:
    """The loads under way: importing a part's module may itself look up other parts."""

    depth: int = 0  # number of nested loads
    choices: bool = False  # whether `load_choices` was called during these loads


_loads = _Loads()


def _load(kind: str) -> None:
    """Import the modules of a kind and then, unless another load is under way, those of other packages."""
    _loads.depth += 1
    try:
        for module in recipe_modules(kind):
            importlib.import_module(module)
        if _loads.depth == 1:
            _load_entry_points(kind)
    finally:
        _loads.depth -= 1
    if _loads.choices and not _loads.depth:
        _loads.choices = False
        load_choices()


@cache
def recipe_modules(kind: str) -> tuple[str, ...]:
    """Return the names of all modules of a kind below `recipe/`. An ImportError says that the `recipe` that Python
    imports is another project's, such as a checkout of verl's own."""
    recipe, own = importlib.import_module("recipe"), Path(__file__).resolve().parents[2] / "recipe"
    imported = [Path(folder).resolve() for folder in recipe.__path__]
    if imported[0] != own:
        raise ImportError(
            f"the package `recipe` that Python imports lies in {imported[0]}, and the methods of this run in {own}: "
            "start Python in another folder, or put the second one's parent first on PYTHONPATH"
        )
    files = sorted(own.rglob(f"{kind}.py"))
    return tuple(".".join(("recipe", *file.relative_to(own).with_suffix("").parts)) for file in files)


@cache
def _load_entry_points(kind: str) -> None:
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            loaded = entry.load()
            module = f"{entry.value}.{kind}"
            if hasattr(loaded, "__path__") and importlib.util.find_spec(module):
                importlib.import_module(module)
        except Exception as error:
            raise ImportError(f"the parts of the entry point {entry.name} ({entry.value}): {error!r}") from error


def add_part(kind: str, name: str, new: T) -> T:
    """Register a part of a kind under its name; raise ValueError if there is one already. `register_*` call this."""
    if name in _registered[kind]:
        raise ValueError(f"there are two parts {kind}={name}")
    _registered[kind][name] = new
    if isinstance(new, Part):
        ConfigStore.instance().store(group=kind, name=name, node=new.node(), package="_global_")
    return new


def nested(values: Mapping[str, Any]) -> DictConfig:
    """Return a nested config from values whose keys are paths with dots."""
    config = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def register_tree(
    name: str,
    about: str,
    *,
    keys: type | None = None,
    section: str | None = None,
    omit_defaults: tuple[str, ...] = (),
    extends: str | None = None,
    values: Mapping[str, Any] | None = None,
    smallest: Mapping[str, Any] | None = None,
    **options: Any,
) -> Callable[[type], type]:
    """Return a class decorator that registers a `BranchPolicy` as `tree=<name>`.

    The class's attribute `part` becomes the registered `Tree`; with `extends`, it remains that of the older tree.

    Args:
        keys: dataclass of the policy's settings, with a default for each.
        section: section of the settings; by default `actor_rollout_ref.rollout.custom.<name>`.
        omit_defaults: keys that stay absent from the config unless the user sets them.
        extends: name of an older tree. The new one is a variant of it with the same policy, keys and values.
        values: further config values of the choice; for a variant, the values that differ.
        smallest: see `Part`; a name without a dot is one of `keys`, other names are paths from the config's root.
        options: other fields of `Tree`.
    """
    section, values = section or f"{ROLLOUT}.custom.{name}", dict(values or {})

    def register(policy: type) -> type:
        if extends is not None:
            older = _registered["tree"][extends]
            changed = {"name": name, "about": about, "values": older.values | values, **options}
            add_part("tree", name, replace(older, variant=values, rollout_names=(), rollout_modes=(), **changed))
            return policy
        set_by_choice: dict[str, Any] = {f"{ROLLOUT}.tree": name}
        if keys is not None:
            defaults = {key: value for key, value in asdict(keys()).items() if key not in omit_defaults}
            set_by_choice |= _below(section, defaults)
            if options.get("trajectories"):
                set_by_choice[f"{ROLLOUT}.n"] = options["trajectories"](keys())
        tree = Tree(
            name=name,
            about=about,
            policy=policy,
            keys=keys,
            section=section if keys is not None else "",
            values=set_by_choice | values,
            smallest={key if "." in key else f"{section}.{key}": value for key, value in (smallest or {}).items()},
            **options,
        )
        policy.part = add_part("tree", name, tree)  # type: ignore[attr-defined]
        return policy

    return register


def register_sampler(name: str, about: str, *, values: Mapping[str, Any] | None = None, **options: Any) -> Sampler:
    """Register a way to draw tokens as `sampler=<name>`; see `Sampler`. `values` are keys of `rollout`."""
    return add_part("sampler", name, Sampler(name=name, about=about, values=_below(ROLLOUT, values), **options))


def register_credit(name: str, about: str, **options: Any) -> Callable[[Callable], Callable]:
    """Register a function (rewards, mask, index, epsilon, norm) -> (B, T) advantages as `credit=<name>`, which sets
    `algorithm.adv_estimator=<name>`; see `Credit`.

    Its arguments: (B, T) token-level rewards, whose sum is the trajectory's outcome; (B, T) response mask, outside of
    which advantages are set to 0; (B,) prompt ids, equal within a group; a number that is added to a standard
    deviation; verl's `norm_adv_by_std_in_grpo`. A credit with `keys` gets its settings as a sixth argument.
    """
    # The import stands here because core_algos imports the parts, whose modules need this function.
    from verl.trainer.ppo.core_algos import register_adv_est

    def register(function: Callable) -> Callable:
        credit = describe_credit(name, about, **options)

        @register_adv_est(name)
        def estimator(token_level_rewards, response_mask, index, epsilon: float = 1e-6, config=None):
            import torch

            norm = True if config is None else config.get("norm_adv_by_std_in_grpo", True)
            settings = [] if credit.keys is None else [credit.read(config)]
            with torch.no_grad():
                advantages = function(token_level_rewards, response_mask, index, epsilon, norm, *settings)
                advantages = advantages * response_mask
            return advantages, advantages

        estimator.__module__, estimator.__doc__ = function.__module__, function.__doc__
        return estimator

    return register


def describe_credit(
    name: str,
    about: str,
    *,
    keys: type | None = None,
    values: Mapping[str, Any] | None = None,
    smallest: Mapping[str, Any] | None = None,
    **options: Any,
) -> Credit:
    """Register an estimator that verl's own registry has already. `smallest`: names of `keys` -> value."""
    section = f"algorithm.{name}"
    options["smallest"] = _below(section, smallest)
    defaults = {} if keys is None else _below(section, asdict(keys()))
    options["values"] = {"algorithm.adv_estimator": name} | defaults | dict(values or {})
    return add_part("credit", name, Credit(name=name, about=about, keys=keys, **options))


def register_loss(name: str, about: str, **options: Any) -> Callable[[Callable], Callable]:
    """Register a function with the signature of verl's policy losses as `loss=<name>`, which sets
    `actor.policy_loss.loss_mode=<name>`; see `Loss`. `values` are keys of `actor`, added to those of `loss=vanilla`."""
    from verl.trainer.ppo.core_algos import register_policy_loss

    def register(function: Callable) -> Callable:
        describe_loss(name, about, **options)
        return register_policy_loss(name)(function)

    return register


def describe_loss(name: str, about: str, *, values: Mapping[str, Any] | None = None, **options: Any) -> Loss:
    """Register a policy loss that verl's own registry has already."""
    vanilla_values = {"loss_agg_mode": "token-mean", "use_kl_loss": False, "entropy_coeff": 0}
    all_values = _below(ACTOR, vanilla_values | {"policy_loss.loss_mode": name} | dict(values or {}))
    return add_part("loss", name, Loss(name=name, about=about, values=all_values, **options))


def register_proposal(tree: str) -> Callable[[T], T]:
    """Return a decorator that registers the proposal for a tree's keys (verl/evaluation/exploration/table.py)."""
    return lambda propose: add_part("proposal", tree, propose)


def register_component(component: type[T]) -> type[T]:
    """Register a trainer component (`verl.trainer.ppo.v1.component.Component`)."""
    return add_part("component", component.__name__, component)


# ---- lookups in the registry ----


def loss_of_switch() -> dict[str, str]:
    """Return boolean key of `actor` -> name of the only loss that has it among its `switches`."""
    return {switch: name for name, loss in parts("loss").items() for switch in loss.switches}


def tree_of_rollout_name() -> dict[str, str]:
    """Return `rollout.name` in the scripts of a paper's authors -> the tree's name."""
    return {each: name for name, tree in parts("tree").items() for each in tree.rollout_names}


def tree_of_rollout_mode() -> dict[str, str]:
    """Return `rollout.mode` in the scripts of a paper's authors -> the name of the tree, which uses tools."""
    return {each: name for name, tree in parts("tree").items() for each in tree.rollout_modes}


def tree_part(name: str) -> Tree:
    """Return the tree of `actor_rollout_ref.rollout.tree=name`; raise ValueError if there is none of this name."""
    trees = {choice: tree for choice, tree in parts("tree").items() if not tree.variant}
    if name not in trees:
        raise ValueError(f"{ROLLOUT}.tree={name}: expected one of {', '.join(trees)}")
    return trees[name]


def credit_of(adv_estimator: str | Enum) -> Credit | None:
    """Return the credit of `algorithm.adv_estimator`; None if it is not registered."""
    return parts("credit").get(adv_estimator.value if isinstance(adv_estimator, Enum) else adv_estimator)


def compares(adv_estimator: str | Enum) -> Compares | None:
    """Return the `compares` of an estimator's credit; None if there is none, or the credit is not registered."""
    credit = credit_of(adv_estimator)
    return credit.compares if credit else None


def computed_fields(config: DictConfig) -> dict[TokenField, str]:
    """Return the token fields that a run's trainer computes from the old policy's entropies -> the config key that
    needs the field. No other place decides whether entropies are needed."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    needs: dict[TokenField, str] = {}
    if loss := parts("loss").get(actor.policy_loss.loss_mode):
        needs |= dict.fromkeys(loss.fields(actor), f"actor.policy_loss.loss_mode={loss.name}")
    if credit := credit_of(config.algorithm.adv_estimator):
        needs = {**dict.fromkeys(credit.needs, f"algorithm.adv_estimator={credit.name}"), **needs}
    for sampler in parts("sampler").values():
        if sampler.is_on(rollout):
            needs = {**dict.fromkeys(sampler.needs, f"sampler={sampler.name}"), **needs}
    return {need: key for need, key in needs.items() if need.unsent is None}
