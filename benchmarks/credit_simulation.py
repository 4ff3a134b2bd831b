"""Which credit learns fastest on trees: a tabular policy, K decisions, one right action each, a verifier that errs.

    python -m benchmarks.credit_simulation [--seeds 3]

A prompt's policy has a softmax for each decision; an answer is right when all of its decisions are, and one verdict in
ten is wrong, without which the largest steps would always be best. As many decisions are drawn for each prompt, as

    trajectories   8 of K decisions
    random forks   2 trajectories, then forks of them at random places, continued to the end, as in ARPO and TreeRL
    levels         HATO's search without a value model: 2, 6 and 16 ends after each third of the K decisions

The estimators are the project's own; each has its best learning rate of those tried, and the baseline is `grpo` on
independent trajectories.
Writes benchmarks/results/credit_simulation.md; no engine, one process.
"""

from statistics import fmean

import numpy as np
import torch

from benchmarks.report import parser_of, write_report
from benchmarks.tabular_learning import advantages_of
from benchmarks.tabular_trees import ACTIONS, RIGHT, N

PROMPTS, STEPS, FIRST_ACCURACY, FLIPPED = 16, 40, 0.1, 0.1
LENGTHS, ENDS = (3, 6, 10), (2, 6, 16)
RATES = (4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 96.0, 128.0)
CREDITS = ("grpo", "arpo_hard", "tree_path", "tree_gain", "treerl", "tree_grpo", "hato", "hato, R the mean outcome")
METHODS = [("trajectories", "grpo")] + [(grown, credit) for grown in ("random forks", "levels") for credit in CREDITS]


def first_logits(length: int) -> torch.Tensor:
    """(PROMPTS, length, ACTIONS), with which `FIRST_ACCURACY` of the answers are right whatever the length."""
    right = FIRST_ACCURACY ** (1 / length)
    logits = torch.zeros(PROMPTS, length, ACTIONS)
    logits[:, :, RIGHT] = np.log(right / (1 - right) * (ACTIONS - 1))
    return logits


class Drawing:
    """A prompt's decisions as they are drawn: paths of (action, node).

    Args:
        probs: (length, ACTIONS).
    """

    def __init__(self, probs: np.ndarray, rng: np.random.Generator):
        self.length, self.nodes, self.rng = len(probs), 0, rng
        # more than any tree needs at one place
        self.choices = [rng.choice(ACTIONS, size=2 * N * self.length, p=p).tolist() for p in probs]

    def extended(self, path: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
        """The path with new decisions up to `end`."""
        fresh = [(self.choices[at].pop(), self.nodes + at - len(path)) for at in range(len(path), end)]
        self.nodes += len(fresh)
        return path + fresh


def trajectories(drawing: Drawing) -> list[list[tuple[int, int]]]:
    return [drawing.extended([], drawing.length) for _ in range(N)]


def random_forks(drawing: Drawing) -> list[list[tuple[int, int]]]:
    rows, rng = [drawing.extended([], drawing.length) for _ in range(2)], drawing.rng
    while drawing.nodes < N * drawing.length:
        source, start = rng.integers(len(rows)), int(rng.integers(drawing.length))
        rows.append(drawing.extended(rows[source][:start], drawing.length))
    return rows


def levels(drawing: Drawing) -> list[list[tuple[int, int]]]:
    rows, start = [[]], 0
    for steps, ends in zip(np.array_split(np.arange(drawing.length), len(ENDS)), ENDS, strict=True):
        order, start = drawing.rng.permutation(len(rows)), start + len(steps)
        rows = [drawing.extended(rows[order[i % len(rows)]], start) for i in range(ends)]
    return rows


GROWN = {"trajectories": trajectories, "random forks": random_forks, "levels": levels}


def accuracy_after(length: int, grown: str, credit: str, rate: float, seed: int) -> float:
    """Mean over the prompts of the chance that all decisions are right, after STEPS updates."""
    rng, logits = np.random.default_rng(seed), first_logits(length).requires_grad_()
    for _ in range(STEPS):
        probs = logits.detach().double().softmax(-1).numpy()
        made = [GROWN[grown](Drawing(of_prompt, rng)) for of_prompt in probs]
        groups = np.repeat(np.arange(PROMPTS), [len(rows) for rows in made])
        actions, nodes = torch.tensor([row for rows in made for row in rows]).unbind(-1)
        right = (actions == RIGHT).all(-1).numpy() ^ (rng.random(len(actions)) < FLIPPED)
        advantages = advantages_of(credit, torch.from_numpy(right).float(), groups, nodes)
        log_probs = logits.log_softmax(-1)[torch.from_numpy(groups)].gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        loss = -(advantages * log_probs).sum() / (PROMPTS * N * length)
        (gradient,) = torch.autograd.grad(loss, logits)
        with torch.no_grad():
            logits -= rate * length * gradient  # the same step of a decision whatever the length
    return logits.detach().softmax(-1)[:, :, RIGHT].prod(-1).mean().item()


def main() -> None:
    parser = parser_of(__doc__, seeds=3)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    table, baseline = [], {}
    for grown, credit in METHODS:
        row = [grown, credit]
        for length in LENGTHS:
            of_rates = {
                rate: [accuracy_after(length, grown, credit, rate, seed) for seed in range(args.seeds)]
                for rate in args.rates
            }
            rate, accuracies = max(of_rates.items(), key=lambda item: fmean(item[1]))
            mean = fmean(accuracies)
            ratio = mean / baseline.setdefault(length, mean)
            spread = f"{min(accuracies):.2f} to {max(accuracies):.2f}"
            row.append(f"{mean:.2f} ({spread}), {ratio:.2f} x, rate {rate:g}")
        table.append(row)
        print(*row, sep=" | ", flush=True)
    what = (
        f"Chance of a right answer after {STEPS} steps, mean of {args.seeds} seeds (least to most), against `grpo` on "
        f"trajectories, and the best learning rate of {', '.join(f'{rate:g}' for rate in args.rates)}. {PROMPTS} "
        f"prompts, {ACTIONS} actions a decision, {N} x K decisions drawn for a prompt and step, {FIRST_ACCURACY} right "
        f"at first, {FLIPPED} of the verdicts wrong. `hato` has the default weights and no R_local; random forks are "
        f"ARPO's and TreeRL's, levels HATO's ({', '.join(map(str, ENDS))} ends)."
    )
    write_report("credit_simulation", what, ["grown", "credit", *(f"K = {length}" for length in LENGTHS)], table)


if __name__ == "__main__":
    main()
