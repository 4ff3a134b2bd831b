"""Batches of random trees whose rows share a token exactly where they are equal up to it."""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from verl.workers.rollout.trajectory_tree import MODEL, TOOL, Segment, TrajectoryTree

END = 9


class Batch(NamedTuple):
    """Rows of several prompts, in random order."""

    rows: list[tuple[int, ...]]  # (B,) tokens of each row; no row begins with another one of its prompt
    place: list[int]  # (B,) number of each row among the trajectories of its prompt's tree
    index: np.ndarray  # (B,) prompts
    outcomes: np.ndarray  # (B,) float64
    segment_ids: torch.Tensor  # (B, T), -1 behind the end of a row
    mask: torch.Tensor  # (B, T), 0 for every third token, which a tool wrote, and behind the end of a row


def random_batch(seed: int, n_prompts: int = 4, n_rows: int = 9) -> Batch:
    draw, rows = np.random.default_rng(seed), []
    for prompt in range(n_prompts):
        tree = TrajectoryTree([0])
        texts = {(*draw.integers(0, 2, draw.integers(1, 6)).tolist(), END) for _ in range(n_rows)}
        texts = [texts.pop() for _ in range(len(texts))]
        for text in texts:
            authors = [TOOL if position % 3 == 2 else MODEL for position in range(len(text))]
            segments = [Segment(None, [token], author=author) for token, author in zip(text, authors, strict=True)]
            tree.leaves.append(tree.insert(None, segments))
        tree = tree.renumbered()
        columns = zip(texts, tree.segment_ids(), tree.response_masks(), strict=True)
        rows += [(text, place, prompt, ids, mask) for place, (text, ids, mask) in enumerate(columns)]
    rows = [rows[i] for i in draw.permutation(len(rows))]
    texts, places, prompts, ids, masks = zip(*rows, strict=True)
    segment_ids = pad_sequence([torch.tensor(row) for row in ids], batch_first=True, padding_value=-1)
    mask = pad_sequence([torch.tensor(row, dtype=torch.float64) for row in masks], batch_first=True)
    outcomes = draw.integers(0, 3, len(rows)) / 2
    return Batch(list(texts), list(places), np.array(prompts), outcomes, segment_ids, mask)
