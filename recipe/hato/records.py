"""The records that pass between HATO's tree, in the rollout workers, and its trainer component."""

from typing import NamedTuple


class SearchState(NamedTuple):
    """The state of the search in a training step.

    Args:
        learnt: number of batches that the value model was trained on.
        temperature: sampling temperature of the step.
        value_model: packed state of the value model (`value_model.pack`).
    """

    learnt: int
    temperature: float
    value_model: bytes


class NodeBudget(NamedTuple):
    """The largest number of nodes of one prompt's tree."""

    max_nodes: int


class StepEstimate(NamedTuple):
    """The value model's input and output for a step, from when the step was drawn."""

    features: list[float]
    value: float


class KeptSteps(NamedTuple):
    """The steps of a tree that lead to answers, from which the value model is trained.

    Args:
        segments: id of each step's segment.
        features, values: `StepEstimate` of each step.
    """

    segments: tuple[int, ...]
    features: tuple[list[float], ...]
    values: tuple[float, ...]
