"""How different the answers to a problem are, how far they have moved away from the start policy's, and whether a
predicted value means what it says."""

from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

MAX_PATHS = 16  # that are compared of a problem; the cost grows with the square


def _nearest(path: Sequence[int], others: Sequence[Sequence[int]]) -> float:
    """Smallest edit distance / length of the longer one, in [0, 1]; 1 if there is no other."""
    best = 1.0
    for other in others:
        # the cut-off lets a distance that is no better be given up early; it counts as 1 then
        best = min(best, Levenshtein.normalized_distance(path, other, score_cutoff=best))
    return best


def rdi(paths: Sequence[Sequence[int]]) -> float | None:
    """Reasoning diversity: mean over successful paths (token ids) of the distance to the nearest other one.

    Distances are normalized Levenshtein distances, in [0, 1]; 0 where every path has a twin; None for fewer than two
    paths.
    """
    paths = evenly_spaced(paths, MAX_PATHS)
    if len(paths) < 2:
        return None
    return fmean(_nearest(path, [*paths[:i], *paths[i + 1 :]]) for i, path in enumerate(paths))


def novelty(paths: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> float | None:
    """Mean over successful paths of the distance to the nearest path of the start policy for the same problem.

    In [0, 1]; None where either is missing.
    """
    if not paths or not references:
        return None
    return fmean(_nearest(path, references) for path in evenly_spaced(paths, MAX_PATHS))


def evenly_spaced(paths: Sequence, limit: int) -> list:
    """At most `limit` of them, in order; leaves come depth first, so that neighbors are the most alike."""
    if len(paths) <= limit:
        return list(paths)
    return [paths[i * len(paths) // limit] for i in range(limit)]


def calibration_error(predicted: Sequence[float], observed: Sequence[float], n_bins: int = 10) -> float:
    """Expected calibration error (Guo et al., 2017) of predictions in [0, 1], in bins of equal width.

    It is the mean over predictions of |mean predicted - mean observed| of their bin.
    """
    p, y = np.asarray(predicted), np.asarray(observed)
    bins = np.minimum(n_bins - 1, (p * n_bins).astype(int))
    return float(np.abs(np.bincount(bins, p - y)).sum() / len(p))


class ReferencePaths:
    """Paths of the first visit of the first `max_problems` problems, `max_paths` of each, for `novelty`."""

    def __init__(self, max_problems: int, max_paths: int):
        self.max_problems, self.max_paths = max_problems, max_paths
        self._paths: dict[str, list[torch.Tensor]] = {}

    def wants(self, problem: str) -> bool:
        """Whether the problem is new, and there is room for it."""
        return problem not in self._paths and len(self._paths) < self.max_problems

    def keep(self, problem: str, paths: Sequence[Sequence[int]]) -> None:
        """Remembers a problem's paths; those of one that is known, or that there is no room for, are not taken."""
        if paths and self.wants(problem):
            chosen = evenly_spaced(paths, self.max_paths)
            self._paths[problem] = [torch.tensor(path, dtype=torch.int32) for path in chosen]

    def of(self, problem: str) -> list[list[int]]:
        """Empty for a problem that is not known."""
        return [path.tolist() for path in self._paths.get(problem, [])]

    def state_dict(self) -> dict:
        """For torch.save; few large tensors, as many small ones take minutes to load."""
        paths = [path for of_problem in self._paths.values() for path in of_problem]
        return {
            "problems": list(self._paths),
            "counts": torch.tensor([len(of_problem) for of_problem in self._paths.values()], dtype=torch.int64),
            "lengths": torch.tensor([len(path) for path in paths], dtype=torch.int64),
            "tokens": torch.cat([torch.zeros(0, dtype=torch.int32), *paths]),
        }

    def load_state_dict(self, state: dict) -> None:
        paths = iter(state["tokens"].split(state["lengths"].tolist()))
        counts = state["counts"].tolist()
        self._paths = {
            problem: [next(paths).clone() for _ in range(count)]
            for problem, count in zip(state["problems"], counts, strict=True)
        }
