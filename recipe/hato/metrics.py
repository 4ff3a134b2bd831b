"""Metrics: diversity of the answers to a problem, their distance from the start policy's answers, and calibration
of the value model."""

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean

import numpy as np
import torch
from rapidfuzz.distance import Levenshtein

MAX_PATHS = 16  # most paths of a problem that are compared; the cost grows with the square of their number


def rdi(paths: Sequence[Sequence[int]]) -> float | None:
    """Return the reasoning diversity: mean over successful paths (token ids) of the distance to the nearest other one.

    Distances are Levenshtein's, normalized to [0, 1], between at most `MAX_PATHS` evenly spaced paths. The result is
    None for fewer than two paths.
    """
    paths = evenly_spaced(paths, MAX_PATHS)
    if len(paths) < 2:
        return None
    nearest = [1.0] * len(paths)
    for i, j in combinations(range(len(paths)), 2):
        cutoff = max(nearest[i], nearest[j])  # a larger distance counts as 1, and is not computed to its end
        distance = Levenshtein.normalized_distance(paths[i], paths[j], score_cutoff=cutoff)
        nearest[i], nearest[j] = min(nearest[i], distance), min(nearest[j], distance)
    return fmean(nearest)


def novelty(paths: Sequence[Sequence[int]], references: Sequence[Sequence[int]]) -> float | None:
    """Return the mean over at most `MAX_PATHS` successful paths of the distance, in [0, 1], to the start policy's
    nearest path for the problem; None if there are no paths or no references."""
    if not paths or not references:
        return None
    distances = []
    for path in evenly_spaced(paths, MAX_PATHS):
        distances.append(1.0)
        for reference in references:
            distance = Levenshtein.normalized_distance(path, reference, score_cutoff=distances[-1])
            distances[-1] = min(distances[-1], distance)
    return fmean(distances)


def evenly_spaced(paths: Sequence, limit: int) -> list:
    """Return at most `limit` paths, in order and evenly spaced: neighbors, in depth-first order, are the most alike."""
    if len(paths) <= limit:
        return list(paths)
    return [paths[i * len(paths) // limit] for i in range(limit)]


def calibration_error(predicted: Sequence[float], observed: Sequence[float], n_bins: int = 10) -> float:
    """Return the expected calibration error (Guo et al., 2017) of predictions in [0, 1], in bins of equal width: the
    mean over predictions of |mean predicted - mean observed| of their bin."""
    p, y = np.asarray(predicted), np.asarray(observed)
    bins = np.minimum(n_bins - 1, (p * n_bins).astype(int))
    return float(np.abs(np.bincount(bins, p - y)).sum() / len(p))


class ReferencePaths:
    """Reference paths for `novelty`: up to `max_paths` of the first visit to the first `max_problems` problems."""

    def __init__(self, max_problems: int, max_paths: int):
        self.max_problems, self.max_paths = max_problems, max_paths
        self._paths: dict[str, list[torch.Tensor]] = {}

    def wants(self, problem: str) -> bool:
        """Return whether the problem is new and fewer than `max_problems` are kept."""
        return problem not in self._paths and len(self._paths) < self.max_problems

    def keep(self, problem: str, paths: Sequence[Sequence[int] | torch.Tensor]) -> None:
        """Keep some of a problem's paths, if there are any and `wants` is true for the problem."""
        if paths and self.wants(problem):
            chosen = evenly_spaced(paths, self.max_paths)
            self._paths[problem] = [torch.as_tensor(path, dtype=torch.int32) for path in chosen]

    def of(self, problem: str) -> list[list[int]]:
        """Return a problem's paths as token ids; none for a problem that is not kept."""
        return [path.tolist() for path in self._paths.get(problem, [])]

    def state_dict(self) -> dict:
        """Return the state for torch.save, in a few large tensors: many small ones take minutes to load."""
        paths = [path for problem_paths in self._paths.values() for path in problem_paths]
        return {
            "problems": list(self._paths),
            "counts": torch.tensor([len(kept) for kept in self._paths.values()], dtype=torch.int64),
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
