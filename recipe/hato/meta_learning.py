"""Meta-learning of initial policy parameters from which a few training steps learn a domain.

An episode begins at theta, makes `n_inner_steps` training steps on ONE domain, and ends:
    reptile  theta + meta_lr (theta_inner - theta)                                        (Nichol et al., 2018)
    maml     theta, stepped by the optimizer with the gradient at theta_inner, first order   (Finn et al., 2017)

Everything works on this rank's part of a parameter, a plain tensor or the shard of a DTensor, one parameter at a time
and without communication.
"""

import logging
import math
from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor, Replicate

logger = logging.getLogger(__name__)


def shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor, as a view that autograd does not track."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _ranks_with_the_same(p: torch.Tensor) -> int:
    placements = enumerate(p.placements) if isinstance(p, DTensor) else ()
    return math.prod(p.device_mesh.size(i) for i, placement in placements if isinstance(placement, Replicate))


class MetaEpisode:
    """One episode around an optimizer that its caller steps; it stores theta at the beginning.

        ... steps ...    reptile: the optimizer's own. maml: theta - inner_lr * gradient, without its state
        query()          maml only: from here on gradients are averaged at theta_inner, and nothing moves
        ... steps ...    maml only
        end()            reptile: interpolated. maml: theta is back and holds the mean gradient; step the optimizer now

    The optimizer must skip parameters without gradient, as all of torch's do. maml's inner_lr is not comparable with
    Adam's: with gradients clipped to norm 1 a step moves the policy by at most inner_lr, one of Adam by about lr
    sqrt(parameters).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, *, method: str, meta_lr: float = 0.1, inner_lr: float = 0.01):
        self.optimizer, self.method, self.meta_lr, self.inner_lr = optimizer, method, meta_lr, inner_lr
        self.start = [shard(p).to("cpu", copy=True) for p in self.parameters()]
        self.querying = False
        self.gradients: dict[int, torch.Tensor] = {}  # index of a parameter -> sum of its gradients over query steps
        self.query_steps = 0
        self._hook = optimizer.register_step_pre_hook(self._instead_of_a_step) if method == "maml" else None

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the optimizer's parameters that require a gradient, in the order of its groups."""
        return (p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad)

    def query(self) -> None:
        self.querying = True

    def end(self) -> None:
        """End the episode: move to reptile's interpolation, or restore theta and set `grad` to maml's mean gradient. If
        no finite gradient came after `query`, every `grad` is None, so that the optimizer's step changes nothing."""
        pairs = zip(self.parameters(), self.start, strict=True)
        if self.method == "reptile":
            for p, saved in pairs:  # in float32, rounded once
                own = shard(p)
                own.copy_(torch.lerp(saved.to(own.device, torch.float32), own.float(), self.meta_lr))
            return
        if self._hook is not None:
            self._hook.remove()
        if not self.query_steps:
            logger.warning("meta-learning: no finite gradient came after query(); this episode changes nothing")
        for number, (p, saved) in enumerate(pairs):
            shard(p).copy_(saved)
            p.grad = _like(p, self.gradients[number] / self.query_steps) if number in self.gradients else None

    def distance_squared(self) -> float:
        """Return this rank's part of |theta_inner - theta|^2; the sum over a device mesh's ranks is the whole."""
        total = 0.0
        for p, saved in zip(self.parameters(), self.start, strict=True):
            own = shard(p)
            square = (own.float() - saved.to(own.device, torch.float32)).square().sum().item()
            total += square / _ranks_with_the_same(p)
        return total

    @torch.no_grad()
    def _instead_of_a_step(self, *_) -> None:
        """Do maml's own step, or add to its mean gradient; remove the gradients, so that the optimizer does nothing."""
        for number, p in enumerate(self.parameters()):
            if p.grad is None:
                continue
            own, gradient = shard(p), shard(p.grad)
            if not self.querying:
                own.sub_(gradient.to(own.dtype), alpha=self.inner_lr)
            else:
                gradient = gradient.to("cpu", torch.float32, copy=True)
                self.gradients[number] = self.gradients[number].add_(gradient) if number in self.gradients else gradient
            p.grad = None
        self.query_steps += self.querying


def _like(p: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return `own`, this rank's shard, with the device, dtype and DTensor layout of `p`."""
    own = own.to(p.device, p.dtype)
    if not isinstance(p, DTensor):
        return own
    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())


def episode_length(method: str, n_inner_steps: int) -> int:
    """Return the number of training steps in an episode: the inner ones, and one more for maml's query."""
    return n_inner_steps + (method == "maml")


def episode_calls(step: int, method: str, n_inner_steps: int) -> tuple[list[str], list[str]]:
    """Return the worker methods to call before and after the actor's update in training step `step`, from 1 on.

        >>> [episode_calls(step, "maml", n_inner_steps=2) for step in (1, 2, 3)]
        [(['meta_begin'], []), ([], []), (['meta_query'], ['meta_end'])]

    The position within an episode depends on `step` alone.
    """
    length = episode_length(method, n_inner_steps)
    position = (step - 1) % length
    before = ["meta_begin"] if position == 0 else []
    before += ["meta_query"] if method == "maml" and position == n_inner_steps else []
    return before, ["meta_end"] if position == length - 1 else []
