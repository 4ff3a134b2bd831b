"""Models that estimate how likely a reasoning step leads to a correct answer, and how unsure they are; trained online.

    >>> model = value_model_of(config, seed=0)
    >>> value, uncertainty = model.predict(features)     # (N, F) -> (N,), (N,)
    >>> model.observe(features, outcomes)                # when the paths have been scored

Kinds of uncertainty, each the standard deviation of several estimates of the same value:
    ensemble   networks that each see their own resampling of the data, on top of a fixed random network each, which
               keeps them apart where there is no data (Osband et al., 2016 and 2018)
    dropout    one network under dropout masks (Gal & Ghahramani, 2016), drawn once, so that an estimate does not depend
               on earlier calls
    bootstrap  no network: mean outcome of similar remembered steps, over resamplings of the memory
    none       one network: a value, and uncertainty 0

Shapes: N rows, F features, M remembered steps, K estimates, B rows of a mini-batch, H hidden units.
"""

import io
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import nn

from recipe.hato.keys import HATOConfig, UncertaintyConfig

COMPARED_ROWS = 1024  # most steps that `bootstrap` remembers, as each prediction compares with all of them
BANDWIDTH = 0.5  # width of `bootstrap`'s kernel, in standard deviations per feature
BATCH_SIZE = 256

FEATURES = (
    "mean_probability",  # geometric mean over the step's tokens
    "min_probability",  # probability of the least likely token
    "mean_entropy",  # over the step's tokens, as a share of log |V|
    "length",  # share of the tokens a step may have
    "depth",  # share of the greatest depth
    "path_probability",  # geometric mean over all tokens from the root
    "sibling_agreement",  # see `agreement`
    "budget_used",  # share of the tree's budget spent when the step was made
    "finished",  # 1 if the step ends the response, else 0
    "local_reward",  # R_local
)


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


class StepEstimate(NamedTuple):
    """The value model's input and output for a step, from when the step was drawn."""

    features: list[float]
    value: float


class KeptSteps(NamedTuple):
    """The steps of a tree that lead to answers, from which the value model is trained: id of each step's segment -> its
    estimate."""

    estimates: dict[int, StepEstimate]


def step_features(
    *,
    log_probs: Sequence[float],
    entropies: Sequence[float],
    path_log_probs: Sequence[float],
    max_tokens: int,
    depth: int,
    max_depth: int,
    siblings_agreement: float,
    budget_used: float,
    finished: bool,
    local_reward: float,
) -> list[float]:
    """Return the features of one step, in the order of `FEATURES`, whose comments define them: the value model's only
    input.

    The engine's numbers do not reflect what a step means; a local reward can (such as a process reward model), and the
    value model learns how much weight it deserves. Every feature lies in [0, 1] without statistics of the data, so that
    a vector means the same in every process and at every time of a run.

    Args:
        log_probs: log-probabilities of the step's tokens, in nats; at least one.
        entropies: entropies of their distributions, over log |V|; empty if the engine reports none (the feature is 0).
        path_log_probs: log-probabilities of all tokens from the root to the step's last.
        max_tokens, max_depth: largest number of tokens of a step, and of steps of a path.
    """
    raw = (
        math.exp(sum(log_probs) / len(log_probs)),
        math.exp(min(log_probs)),
        sum(entropies) / len(entropies) if entropies else 0.0,
        len(log_probs) / max_tokens,
        depth / max_depth,
        math.exp(sum(path_log_probs) / len(path_log_probs)),
        siblings_agreement,
        budget_used,
        float(finished),
        local_reward,
    )
    return [min(1.0, max(0.0, value)) for value in raw]


def agreement(step: set[int], siblings: Sequence[set[int]]) -> float:
    """Return the mean Jaccard similarity of a step's set of token ids with each sibling's; 0 without siblings."""
    similarities = [len(step & sibling) / max(1, len(step | sibling)) for sibling in siblings]
    return sum(similarities) / len(siblings) if siblings else 0.0


def value_model_of(config: HATOConfig, seed: int, n_features: int = len(FEATURES)) -> "ValueModel":
    """Return the value model that `hato.uncertainty` and `hato.memory` describe."""
    settings, memory_size = config.uncertainty, config.memory.value_buffer_size
    if settings.method == "bootstrap":
        return BootstrapValueModel(n_features, seed, min(memory_size, COMPARED_ROWS), settings.n_passes)
    return NetworkValueModel(settings, n_features, seed, memory_size)


def pack(state: dict) -> bytes:
    """Return a value model's state as bytes, to send to another process."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def unpack(packed: bytes) -> dict:
    """Return the state of a value model from the bytes that `pack` made of it."""
    return torch.load(io.BytesIO(packed), weights_only=True)


class ValueModel(ABC):
    """A memory of steps and their outcomes, and an estimate computed from it.

    The last `memory_size` steps are kept. Each step has a weight in each of the `resamplings` of the memory, drawn from
    Poisson(1): the online bootstrap (Oza & Russell, 2001). With one resampling, all weights are 1.
    """

    def __init__(self, n_features: int, seed: int, memory_size: int, resamplings: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.memory_size = memory_size
        self.features_MF = torch.zeros(0, n_features)
        self.outcomes_M = torch.zeros(0)
        self.weights_MK = torch.zeros(0, resamplings)

    @torch.no_grad()
    def predict(self, features) -> tuple[torch.Tensor, torch.Tensor]:
        """Return value in [0, 1] and uncertainty (0 or more) of each row of `features` (N, F): float32 tensors (N,)."""
        estimates_KN = self._estimates(torch.as_tensor(features, dtype=torch.float32))
        value_N = estimates_KN.mean(0)
        return value_N, (estimates_KN - value_N).square().mean(0).sqrt()

    def observe(self, features, outcomes) -> None:
        """Remember N steps and `outcomes` (N,), the share of right answers below each; networks are then trained on the
        memory.

        At most a quarter of the memory's size is taken, drawn at random, so that one call never replaces the whole
        memory.
        """
        features_NF, outcomes_N = (torch.as_tensor(x, dtype=torch.float32) for x in (features, outcomes))
        if not len(features_NF):
            return
        most = max(1, self.memory_size // 4)
        if len(features_NF) > most:
            chosen = torch.randperm(len(features_NF), generator=self.generator)[:most].sort().values
            features_NF, outcomes_N = features_NF[chosen], outcomes_N[chosen]
        ones = torch.ones(len(features_NF), self.weights_MK.shape[1])
        weights_NK = torch.poisson(ones, generator=self.generator) if ones.shape[1] > 1 else ones
        self.features_MF = torch.cat([self.features_MF, features_NF])[-self.memory_size :].clone()
        self.outcomes_M = torch.cat([self.outcomes_M, outcomes_N])[-self.memory_size :].clone()
        self.weights_MK = torch.cat([self.weights_MK, weights_NK])[-self.memory_size :].clone()

    def state_dict(self) -> dict:
        """Return all that a copy needs to continue exactly like this model, as tensors for torch.save."""
        memory = {"features": self.features_MF, "outcomes": self.outcomes_M, "weights": self.weights_MK}
        return {"memory": memory, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        """Load the state of a model with the same settings; only the size of the memory may differ."""
        self.features_MF, self.outcomes_M, self.weights_MK = (
            state["memory"][name][-self.memory_size :].clone() for name in ("features", "outcomes", "weights")
        )
        self.generator.set_state(state["generator"])

    @abstractmethod
    def _estimates(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return the estimates (K, N), each in [0, 1]."""


class NetworkValueModel(ValueModel):
    """The value model of the kinds `ensemble`, `dropout` and `none`."""

    def __init__(self, settings: UncertaintyConfig, n_features: int, seed: int, memory_size: int):
        self.networks, self.n_updates = Networks(settings, n_features, seed), settings.n_updates
        super().__init__(n_features, seed, memory_size, self.networks.members)
        self.optimizer = torch.optim.AdamW(self.networks.parameters(), lr=settings.learning_rate, weight_decay=1e-2)

    def _estimates(self, features_NF: torch.Tensor) -> torch.Tensor:
        return self.networks.logits(features_NF, self.networks.masks).sigmoid()

    def observe(self, features, outcomes) -> None:
        super().observe(features, outcomes)
        for _ in range(self.n_updates if len(self.outcomes_M) else 0):
            rows = torch.randint(len(self.outcomes_M), (BATCH_SIZE,), generator=self.generator)
            masks = self.networks.draw_masks(self.networks.members, len(rows), self.generator)
            logits_KB = self.networks.logits(self.features_MF[rows], masks)
            targets_KB = self.outcomes_M[rows].expand_as(logits_KB)
            weights_KB = self.weights_MK[rows].T
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits_KB, targets_KB, weights_KB)
            self.optimizer.zero_grad()
            (loss * len(logits_KB)).backward()  # each network minimizes its own mean loss
            self.optimizer.step()
        if not all(parameter.isfinite().all() for parameter in self.networks.parameters()):
            raise ValueError(
                "HATO's value model gives estimates that are not finite: lower hato.uncertainty.learning_rate, and "
                "resume from a checkpoint that was written before"
            )

    def state_dict(self) -> dict:
        learnt = {"networks": self.networks.state_dict(), "optimizer": self.optimizer.state_dict()}
        return super().state_dict() | learnt

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.networks.load_state_dict(state["networks"])
        if "optimizer" in state:  # a model that only predicts has no optimizer state
            self.optimizer.load_state_dict(state["optimizer"])


class BootstrapValueModel(ValueModel):
    """The value model of kind `bootstrap`: kernel-weighted means of remembered outcomes, per resampling of the memory.

    Each resampling also has an artificial outcome, which counts like a remembered step equal to the one that is
    estimated. These outcomes are spread around the mean outcome, not drawn at random: they keep the resamplings apart
    where few similar steps are remembered, and hardly matter where many are.
    """

    def __init__(self, n_features: int, seed: int, memory_size: int, resamplings: int):
        super().__init__(n_features, seed, memory_size, resamplings)
        middles = (torch.arange(resamplings) + 0.5) / resamplings
        self.prior_logits_K = math.sqrt(2) * torch.erfinv(2 * middles - 1)  # a standard normal's quantiles

    def _estimates(self, features_NF: torch.Tensor) -> torch.Tensor:
        hits, n = self.outcomes_M.sum(), len(self.outcomes_M)
        prior_K = (torch.logit((hits + 1) / (n + 2)) + self.prior_logits_K).sigmoid()
        similarity_NM = self._similarity(features_NF)
        hits_NK = similarity_NM @ (self.weights_MK * self.outcomes_M[:, None])
        counts_NK = similarity_NM @ self.weights_MK
        return ((hits_NK + prior_K) / (counts_NK + 1)).T

    def _similarity(self, features_NF: torch.Tensor) -> torch.Tensor:
        """Return exp(-d^2 / 2) (N, M); d is the root mean square difference of features, in `BANDWIDTH` deviations."""
        if not len(self.features_MF):
            return torch.zeros(len(features_NF), 0)
        scale_F = BANDWIDTH * self.features_MF.std(0, correction=0).clamp(min=0.01)
        scale_F = scale_F * math.sqrt(self.features_MF.shape[1])
        a_NF, b_MF = features_NF / scale_F, self.features_MF / scale_F
        exponent = torch.addmm(-b_MF.square().sum(1)[None] / 2, a_NF, b_MF.T)
        return exponent.sub_(a_NF.square().sum(1, keepdim=True) / 2).clamp_(max=0).exp_()


class Networks(nn.Module):
    """ReLU networks of the same shape with one logit each, evaluated in one batched pass.

    An ensemble has `n_models` members; a fixed random network, with an output of standard deviation about 0.7, is
    added to each. The other kinds have one member. With dropout, `masks` are `n_passes` fixed masks of hidden units.
    """

    def __init__(self, settings: UncertaintyConfig, n_features: int, seed: int):
        super().__init__()
        generator, model = torch.Generator().manual_seed(seed), settings.model_config
        sizes = [n_features] + [model.hidden_size] * model.n_layers + [1]
        self.prior = settings.method == "ensemble"
        self.members = settings.n_models if self.prior else 1
        self.dropout = model.dropout if settings.method == "dropout" else 0.0
        self.weights, self.biases = _layers(sizes, self.members, generator)
        self.prior_weights, self.prior_biases = _layers(sizes, self.members, generator)
        self.prior_weights.requires_grad_(False)
        self.prior_biases.requires_grad_(False)
        masks = self.draw_masks(settings.n_passes, 1, generator)
        self.register_buffer("masks", None if masks is None else torch.stack(masks))

    def logits(self, features_NF: torch.Tensor, masks) -> torch.Tensor:
        """Return logits (K, N); `masks`: None, or for each hidden layer a tensor that broadcasts over (K, N, H)."""
        logits = _forward(self.weights, self.biases, features_NF, masks)
        if not self.prior:
            return logits
        return logits + _forward(self.prior_weights, self.prior_biases, features_NF, None)

    def draw_masks(self, kinds: int, n_rows: int, generator: torch.Generator) -> list[torch.Tensor] | None:
        """Draw a mask (kinds, n_rows, H) for each hidden layer: 1 / (1 - dropout) where a unit stays, else 0; None
        without dropout."""
        if not self.dropout:
            return None
        shape = kinds, n_rows, self.weights[0].shape[-1]
        draws = [torch.rand(shape, generator=generator) for _ in self.weights[:-1]]
        return [(draw >= self.dropout).float() / (1 - self.dropout) for draw in draws]


def _layers(sizes: list[int], members: int, generator: torch.Generator) -> tuple[nn.ParameterList, nn.ParameterList]:
    """Draw weights by He's initialization, and random biases; the output has a standard deviation of about 0.7."""
    pairs = list(pairwise(sizes))
    weights = [torch.randn(members, a, b, generator=generator) * ((1 if b == 1 else 2) / a) ** 0.5 for a, b in pairs]
    biases = [torch.randn(members, 1, b, generator=generator) * 0.3 * (b > 1) for _, b in pairs]
    return nn.ParameterList(weights), nn.ParameterList(biases)


def _forward(weights, biases, features_NF: torch.Tensor, masks) -> torch.Tensor:
    hidden = features_NF.expand(len(weights[0]), -1, -1)
    for layer, (weight, bias) in enumerate(zip(weights[:-1], biases[:-1], strict=True)):
        hidden = (hidden @ weight + bias).relu()
        if masks is not None:
            hidden = hidden * masks[layer]
    return (hidden @ weights[-1] + biases[-1]).squeeze(-1)
