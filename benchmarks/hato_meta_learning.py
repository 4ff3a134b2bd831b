"""Does a meta-learnt start learn a new domain faster? Sine waves, a domain is amplitude and phase (Finn et al., 2017).

    python benchmarks/hato_meta_learning.py [--seeds 3] [--domains 1500]

Every method takes 5 gradients of 20 points on each domain; then the loss is measured on new domains after 5 steps of
plain SGD on each. Baseline: plain training, the same gradients stepped by Adam. Writes
benchmarks/results/hato_meta_learning.md.
"""

import argparse

import numpy as np
import torch

from benchmarks.report import write_report
from verl.workers.utils.meta_learning import MetaEpisode, restore_, snapshot

METHODS = ("plain", "reptile", "maml")


def sine(generator: torch.Generator):
    amplitude, phase = 0.5 + 4 * torch.rand(1, generator=generator), 3.14 * torch.rand(1, generator=generator)

    def draw(n: int):
        x = 10 * torch.rand(n, 1, generator=generator) - 5
        return x, amplitude * torch.sin(x + phase)

    return draw


def loss_of(model, draw, n: int = 20) -> torch.Tensor:
    x, y = draw(n)
    return (model(x) - y).square().mean()


def step(model, optimizer, draw) -> None:
    optimizer.zero_grad()
    loss_of(model, draw).backward()
    optimizer.step()


def learnt_start(method: str, seed: int, domains: int) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    hidden = [torch.nn.Linear(1, 40), torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh()]
    model = torch.nn.Sequential(*hidden, torch.nn.Linear(40, 1))
    adam = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02) if method == "reptile" else adam
    for _ in range(domains):
        draw = sine(generator)
        episode = None if method == "plain" else MetaEpisode(optimizer, method=method, meta_lr=0.3, inner_lr=0.02)
        if episode:
            episode.begin()
        for number in range(5):
            if method == "maml" and number == 4:
                episode.query()
            step(model, optimizer, draw)
        if episode:
            episode.end()
        if method == "maml":
            adam.step()
    return model


def losses_after_adapting(model, seed: int, steps: tuple[int, ...] = (0, 5), domains: int = 30) -> list[float]:
    """Mean over new domains, after so many steps of SGD on each."""
    generator = torch.Generator().manual_seed(10_000 + seed)
    start, total = snapshot(model.parameters()), np.zeros(len(steps))
    for _ in range(domains):
        draw = sine(generator)
        sgd = torch.optim.SGD(model.parameters(), lr=0.02)
        for number in range(max(steps) + 1):
            if number in steps:
                total[steps.index(number)] += loss_of(model, draw, 200).item()
            step(model, sgd, draw)
        restore_(model.parameters(), start)
    return list(total / domains)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--domains", type=int, default=1500)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for domains in (args.domains // 5, args.domains):
        losses = {
            method: np.array(
                [losses_after_adapting(learnt_start(method, seed, domains), seed) for seed in range(args.seeds)]
            )
            for method in METHODS
        }
        for method, found in losses.items():
            ratio = (found[:, 1] / losses["plain"][:, 1]).mean()
            each = ", ".join(f"{loss:.2f}" for loss in found[:, 1])
            rows.append((str(domains), method, f"{found[:, 0].mean():.2f}", f"{found[:, 1].mean():.2f}", each))
            rows[-1] += ("baseline" if method == "plain" else f"{ratio:.2f}",)
    write_report(
        "hato_meta_learning",
        f"Squared error on 30 new domains (sine waves, see the script), {args.seeds} seeds; `ratio` is the mean over "
        "seeds of the loss after 5 steps over plain training's.",
        ("domains trained on", "method", "before adapting", "after 5 steps", "of each seed", "ratio"),
        rows,
    )


if __name__ == "__main__":
    main()
