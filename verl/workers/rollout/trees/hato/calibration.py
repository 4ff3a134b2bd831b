"""Does a predicted value mean what it says? Reliability table and expected calibration error (Guo et al., 2017)."""

from collections.abc import Sequence
from typing import NamedTuple


class Bin(NamedTuple):
    """Predictions in [low, high), the last bin's in [low, 1]; `predicted` and `observed` are means."""

    low: float
    high: float
    predicted: float
    observed: float
    count: int


class Reliability(NamedTuple):
    """`bins`: those that hold a prediction. `ece`: mean over predictions of |predicted - observed| of their bin."""

    bins: list[Bin]
    ece: float


def reliability_table(predicted: Sequence[float], observed: Sequence[float], n_bins: int = 10) -> Reliability:
    """Predictions in [0, 1] against what came out, in bins of equal width.

    Args:
        predicted, observed: of equal length, at least one; `observed` are outcomes or known values in [0, 1].

    Raises:
        ValueError: unequal lengths, nothing to compare, a prediction outside [0, 1].
    """
    predicted, observed = [float(value) for value in predicted], [float(value) for value in observed]
    if not predicted or len(predicted) != len(observed):
        raise ValueError(f"{len(predicted)} predictions, {len(observed)} outcomes: expected as many, and at least one")
    if not all(0 <= value <= 1 for value in predicted):
        raise ValueError(f"predictions lie in [{min(predicted)}, {max(predicted)}]: expected [0, 1]")
    members: list[list[int]] = [[] for _ in range(n_bins)]
    for index, value in enumerate(predicted):
        members[min(n_bins - 1, int(value * n_bins))].append(index)
    bins = [
        Bin(
            low=number / n_bins,
            high=(number + 1) / n_bins,
            predicted=sum(predicted[index] for index in indices) / len(indices),
            observed=sum(observed[index] for index in indices) / len(indices),
            count=len(indices),
        )
        for number, indices in enumerate(members)
        if indices
    ]
    return Reliability(bins, sum(b.count * abs(b.predicted - b.observed) for b in bins) / len(predicted))
