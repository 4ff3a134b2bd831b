"""Every tree with every environment, sampler, credit and loss: a training step on a toy model, without Ray.

    python tests/composition.py      takes steps with every two parts, and writes the table of docs/composition.md

A combination is refused by the checks that stop a run before Ray starts, or takes a step of recipe/common/explain.py:
its prompts are rolled out by what the config names, once for each tree, environment and sampler; rewards differ among
the trajectories of a prompt; estimator and loss are the real ones; the gradient must be finite and not zero. Every two
parts are checked together, and every three but a credit with a tree or environment and a sampler or loss.

The parts are those that are registered (verl.utils.parts), with their smallest settings.
"""

from collections.abc import Callable, Iterator
from functools import cache
from heapq import heapify, heapreplace
from itertools import combinations, product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf

from recipe.common.explain import Batch, WordCount, roll_out, toy, training_step
from recipe.common.menu import choices
from tests.configs import composed_groups, copied
from verl.trainer.checks.parts import TYPED_SECTIONS, check_parts, check_typed_section
from verl.trainer.ppo.v1.component import components_of
from verl.trainer.ppo.v1.explore_trainer import compute_fields
from verl.utils.parts import computed_fields, nested, parts

PAGE = Path(__file__).resolve().parents[1] / "docs/composition.md"
MARK = "<!-- made by python tests/composition.py -->\n"
TREES, ENVIRONMENTS, SAMPLERS, CREDITS, LOSSES = (
    list(choices(part)) for part in ("tree", "environment", "sampler", "credit", "loss")
)
# The gym needs a class of the user, and an agent a program: tests/conformance/trees.py grows every tree in a game of
# the kind.
ENVIRONMENTS = [name for name in ENVIRONMENTS if name not in ("gym", "agent")]
PROMPTS = ("1 2 3 = 6", "4 5 6 = 15")
# large sections of a config that no check of parts reads
NOT_OF_PARTS = ("reward_model", "global_profiler", "skip", "ray_kwargs", "transfer_queue")
SMALL = {
    "data": {"max_prompt_length": 256, "max_response_length": 32},
    "actor_rollout_ref": {"rollout": {"n": 6, "tools": {"call_limit": 2}}},
}


class Cell(NamedTuple):
    """A combination."""

    tree: str
    environment: str
    sampler: str
    credit: str
    loss: str


def cells() -> Iterator[Cell]:
    return map(Cell._make, product(TREES, ENVIRONMENTS, SAMPLERS, CREDITS, LOSSES))


def pairs(cell: Cell) -> set[tuple]:
    """Return each two of a combination's parts, with their kinds."""
    return set(combinations(cell._asdict().items(), 2))


def covering_cells() -> list[Cell]:
    """Return combinations that are not refused and that hold every two parts which go together (a covering array)."""
    open_pairs = {cell: pairs(cell) for cell in cells() if first_refusal(cell) is None}
    missing, chosen = set().union(*open_pairs.values()), []
    # the number of missing pairs that a cell has, negated, or more of them: numbers only get smaller
    heap = [(-len(own), number, cell) for number, (cell, own) in enumerate(open_pairs.items())]
    heapify(heap)
    while missing:
        _, number, cell = heap[0]
        new = -len(open_pairs[cell] & missing), number, cell
        if new > heap[0]:
            heapreplace(heap, new)
            continue
        missing -= open_pairs[cell]
        chosen.append(cell)
    return chosen


# ---- the config of a combination ----


@cache
def composed(tree: str, environment: str) -> DictConfig:
    """Hydra's config of a tree in an environment, with short responses and small groups."""
    groups = ("hardware=cpu", f"tree={tree}", f"environment={environment}")
    config = copied(composed_groups("common", "explore", groups))
    OmegaConf.set_struct(config, False)
    count = {"class_path": f"{WordCount.__module__}.WordCount"}
    _update(config, SMALL)
    _update(config, OmegaConf.to_container(nested(parts("tree")[tree].smallest)))
    if environment != "none":
        config.actor_rollout_ref.rollout.tools.tool_instances = {"search": count}
    OmegaConf.resolve(config)  # the checks would do it again and again
    for section in NOT_OF_PARTS:  # the config is copied for each combination
        config[section] = {}
    for role in ("actor", "ref", "rollout"):
        config.actor_rollout_ref[role].pop("profiler", None)
    return config


def _update(config: DictConfig, values: dict) -> None:
    """Merge the values into the config in place: OmegaConf.merge takes half a second for a whole run's config."""
    for key, value in values.items():
        if isinstance(value, dict) and OmegaConf.is_dict(config.get(key)):
            _update(config[key], value)
        else:
            config[key] = value


def _choose(config: DictConfig, part: str, choice: str) -> None:
    """Put the values of a choice, and its smallest settings, into a config."""
    chosen = parts(part)[choice]
    for values in (chosen.values, chosen.smallest):
        _update(config, OmegaConf.to_container(nested(values)))


@cache
def _chosen(tree: str, environment: str, sampler: str, loss: str) -> tuple[DictConfig, str | None]:
    """The config of a combination but for its credit, and why it is refused, if it is."""
    config = copied(composed(tree, environment))
    _choose(config, "sampler", sampler)
    _choose(config, "loss", loss)
    _update(config, SMALL)
    for key in TYPED_SECTIONS:
        section = str(OmegaConf.select(config, key))
        if section not in _typed:  # a section is the same in many combinations, and slow to build
            _typed[section] = _message(check_typed_section, config, key)
        if _typed[section]:
            return config, _typed[section]
    return config, None


_typed: dict[str, str | None] = {}


def _message(check: Callable[..., None], *arguments) -> str | None:
    """Why a check refuses its arguments; None: it does not."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return None


def config_of(cell: Cell) -> DictConfig:
    config, _ = _chosen(cell.tree, cell.environment, cell.sampler, cell.loss)
    _choose(config, "credit", cell.credit)
    return config


@cache
def refusal(cell: Cell) -> str | None:
    """Why a run with these parts ends before Ray starts; None: it does not."""
    _, reason = _chosen(cell.tree, cell.environment, cell.sampler, cell.loss)
    if reason:
        return reason
    return _message(check_parts, config_of(cell))


def first_refusal(cell: Cell) -> str | None:
    """Why one of the three combinations that share its pairs of parts is refused; None: none of them is."""
    changes = {"credit": "grpo"}, {"sampler": "plain", "loss": "vanilla"}, {"tree": "plain", "environment": "none"}
    return next(filter(None, (refusal(cell._replace(**change)) for change in changes)), None)


# ---- a step ----


@cache
def batch_of(tree: str, environment: str, sampler: str) -> Batch:
    """The rows of both prompts. Every second trajectory is right; while a tree grows, all are wrong: it forks."""
    config, _ = _chosen(tree, environment, sampler, LOSSES[0])
    model, tokenizer = toy(environment != "none")
    components = components_of(config)
    if config.actor_rollout_ref.rollout.adaptive_temperature:
        before = batch_of(tree, environment, "plain")  # a run's first step is sampled plainly
        compute_fields(computed_fields(config), components, before.entropy, before.mask.bool(), {})
    batch = roll_out(config, components, PROMPTS, model, tokenizer, lambda response: 0.0)
    for prompt in PROMPTS:
        for number, row in enumerate(np.flatnonzero(batch.index == prompt)):
            batch.rewards[row, len(batch.rows[row].response_ids) - 1] = float(number % 2 == 0)
    return batch


def take_step(cell: Cell) -> None:
    """
    Raises:
        ArithmeticError: the gradient is not finite, or zero everywhere: nothing is learnt.
    """
    assert refusal(cell) is None, cell
    config = config_of(cell)
    _, gradient = training_step(config, components_of(config), batch_of(cell.tree, cell.environment, cell.sampler))
    largest = gradient.abs().max()
    if not 1e-6 < largest < torch.inf:
        raise ArithmeticError(f"{' '.join(map('='.join, cell._asdict().items()))}: the largest gradient is {largest}")


# ---- the page ----


def table() -> str:
    """Return the parts that all go together, then a table of those that do not, and why a combination is refused."""
    reasons: dict[str, int] = {}
    free, lines = [], ["| tree | environment | credit | which samplers and losses |", "|---|---|---|---|"]
    for tree, environment in product(TREES, ENVIRONMENTS):
        of_entry: dict[str, list[str]] = {}
        for credit in CREDITS:
            of_entry.setdefault(_entry(tree, environment, credit, reasons), []).append(credit)
        if list(of_entry) == ["yes"]:
            free.append(f"{tree} with {environment}")
            continue
        for entry, credits in of_entry.items():
            names = "all" if credits == CREDITS else ", ".join(credits)
            lines.append(f"| {tree} | {environment} | {names} | {entry} |")
    groups = {"trees and environments": free, "credits": CREDITS, "samplers": SAMPLERS, "losses": LOSSES}
    together = [f"- {group}: {', '.join(names)}" for group, names in groups.items()]
    refused = [f"{number}. {reason}" for reason, number in reasons.items()] or ["No combination is refused."]
    return "\n".join(["All of these go together:", "", *together, "", *lines, "", *refused]) + "\n"


def _entry(tree: str, environment: str, credit: str, reasons: dict[str, int]) -> str:
    """`yes`, or for which samplers and losses not, with the number of the reason."""
    refused: dict[str, list[tuple[str, str]]] = {}
    for sampler, loss in product(SAMPLERS, LOSSES):
        if reason := first_refusal(Cell(tree, environment, sampler, credit, loss)):
            refused.setdefault(reason, []).append((sampler, loss))
    notes = [f"not {_shortly(where)} ({reasons.setdefault(why, len(reasons) + 1)})" for why, where in refused.items()]
    return "; ".join(notes) or "yes"


def _shortly(where: list[tuple[str, str]]) -> str:
    samplers, losses = ({pair[i] for pair in where} for i in (0, 1))
    if len(where) < len(samplers) * len(losses):
        return ", ".join(map(" ".join, where))
    names = [sorted(part) for part, whole in ((samplers, SAMPLERS), (losses, LOSSES)) if len(part) < len(whole)]
    return " with ".join(", ".join(part) for part in names) or "at all"


def main() -> None:
    taken = covering_cells()
    for cell in taken:
        take_step(cell)
    head, mark, _ = PAGE.read_text().partition(MARK)
    PAGE.write_text(head + mark + table())
    print(f"{len(taken)} combinations took a step, which hold every two parts that go together: {PAGE}")


if __name__ == "__main__":
    main()
