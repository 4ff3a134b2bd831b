"""Which credit learns fastest on trees: a tabular policy, K decisions, one right action each, a verifier that errs.

    python -m benchmarks.credit_simulation [--seeds 3]

A prompt's policy has a softmax for each decision; an answer is right when all of its decisions are, and one verdict in
ten is wrong, without which the largest steps would always be best. Trajectories: 8 of K decisions. Trees: 2, then forks
at random places, continued to the end, until as many decisions have been drawn: more leaves for the same tokens. The
estimators are the project's own; each has its best learning rate of those tried, and the baseline is `grpo` on
independent trajectories.
Writes benchmarks/results/credit_simulation.md; no engine, one process.
"""

from statistics import fmean

import numpy as np
import torch
from verl.trainer.ppo.core_algos import get_adv_estimator_fn

from benchmarks.report import parser_of, write_report
from verl.trainer.ppo.hato_algos import sibling_advantages
from verl.trainer.ppo.tree_credit import SEGMENT_IDS

PROMPTS, N, ACTIONS, STEPS, FIRST_ACCURACY, FLIPPED = 16, 8, 4, 40, 0.1, 0.1
LENGTHS, RATES = (3, 6, 10), (2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
RIGHT = 0  # the right action of every decision
METHODS = [("trajectories", "grpo")]
METHODS += [("trees", credit) for credit in ("grpo", "arpo_hard", "siblings", "tree_path", "tree_gain", "treerl")]


def first_logits(length: int) -> torch.Tensor:
    """(PROMPTS, length, ACTIONS), with which `FIRST_ACCURACY` of the answers are right whatever the length."""
    right = FIRST_ACCURACY ** (1 / length)
    logits = torch.zeros(PROMPTS, length, ACTIONS)
    logits[:, :, RIGHT] = np.log(right / (1 - right) * (ACTIONS - 1))
    return logits


def drawn(probs: np.ndarray, rng: np.random.Generator, forks: bool) -> tuple[list[list[int]], list[list[int]]]:
    """A prompt's trajectories and, for each of their tokens, its node; probs: (length, ACTIONS)."""
    length = len(probs)
    choices = [rng.choice(ACTIONS, size=N * length, p=p).tolist() for p in probs]
    rows, nodes, budget, fresh = [], [], N * length, 0
    while budget > 0:
        start, row, path = 0, [], []
        if forks and len(rows) >= 2:
            source, start = rng.integers(len(rows)), int(rng.integers(length))
            row, path = rows[source][:start], nodes[source][:start]
        rows.append(row + [choices[at].pop() for at in range(start, length)])
        nodes.append(path + list(range(fresh, fresh + length - start)))
        fresh, budget = fresh + length - start, budget - (length - start)
    return rows, nodes


def advantages_of(credit: str, scores: torch.Tensor, groups: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """(B, length) of one estimator."""
    rewards = torch.zeros(nodes.shape)
    rewards[:, -1] = scores
    if credit == "siblings":
        return sibling_credit(scores, groups, nodes)
    with SEGMENT_IDS.given(nodes):
        return get_adv_estimator_fn(credit)(rewards, torch.ones(nodes.shape), groups)[0]


def sibling_credit(scores: torch.Tensor, groups: np.ndarray, nodes: torch.Tensor) -> torch.Tensor:
    """HATO's: V(node) among the nodes of the same parent, each trained once."""
    unique = (torch.from_numpy(groups).unsqueeze(-1) * 10_000 + nodes).unique(return_inverse=True)[1]
    n, rows = int(unique.max()) + 1, torch.arange(len(nodes)).unsqueeze(-1).expand(nodes.shape)
    passing = unique.flatten().bincount(minlength=n)
    value = torch.zeros(n).index_add_(0, unique.flatten(), scores[rows.flatten()]) / passing
    roots = n + torch.from_numpy(groups).unsqueeze(-1)
    parent = torch.zeros(n, dtype=torch.long)
    parent[unique] = torch.cat([roots, unique[:, :-1]], dim=1)
    siblings = parent.unique(return_inverse=True)[1]
    of_nodes = sibling_advantages(value, siblings, torch.ones(n, dtype=torch.long)).advantages
    return (of_nodes / passing)[unique]


def accuracy_after(length: int, grows: str, credit: str, rate: float, seed: int) -> float:
    """Mean over the prompts of the chance that all decisions are right, after STEPS updates."""
    rng, logits = np.random.default_rng(seed), first_logits(length).requires_grad_()
    for _ in range(STEPS):
        probs = logits.detach().double().softmax(-1).numpy()
        made = [drawn(of_prompt, rng, forks=grows == "trees") for of_prompt in probs]
        groups = np.repeat(np.arange(PROMPTS), [len(rows) for rows, _ in made])
        actions = torch.tensor([row for rows, _ in made for row in rows])
        nodes = torch.tensor([path for _, paths in made for path in paths])
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
    for grows, credit in METHODS:
        row = [grows, credit]
        for length in LENGTHS:
            of_rates = {
                rate: [accuracy_after(length, grows, credit, rate, seed) for seed in range(args.seeds)]
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
        f"at first, {FLIPPED} of the verdicts wrong. `siblings` is HATO's comparison of a step with its siblings alone."
    )
    write_report("credit_simulation", what, ["grown", "credit", *(f"K = {length}" for length in LENGTHS)], table)


if __name__ == "__main__":
    main()
