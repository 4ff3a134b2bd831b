"""How likely a reasoning step leads to a correct answer, and how unsure that estimate is; learnt online.

    >>> model = make_value_model("ensemble", n_features=9, seed=0)
    >>> value, uncertainty = model.predict(features)     # (N, 9) -> (N,), (N,)
    >>> model.observe(features, outcomes)                # when the paths have been scored

Kinds of uncertainty, each the standard deviation of several estimates of the same value:
    ensemble   networks that each see their own resampling of the data, on top of a fixed random network each, which
               keeps them apart where there is no data (Osband et al., 2016 and 2018)
    dropout    one network under dropout masks (Gal & Ghahramani, 2016), drawn once, so that an estimate does not depend
               on what was asked before
    bootstrap  no network: mean outcome of similar remembered steps, over resamplings of the memory
    none       one network: a value, and uncertainty 0
"""

import math
from abc import ABC, abstractmethod

import torch

from verl.workers.rollout.trees.hato.config import HATOConfig
from verl.workers.rollout.trees.hato.step_features import FEATURES
from verl.workers.rollout.trees.hato.value_networks import Networks

KINDS = ("ensemble", "dropout", "bootstrap", "none")
ROWS_AT_ONCE = 2048  # of a prediction, so that its intermediate results stay in the cache
COMPARED_ROWS = 1024


def make_value_model(
    kind: str,
    n_features: int,
    *,
    seed: int = 0,
    hidden_size: int = 64,
    n_layers: int = 2,
    n_models: int = 5,
    dropout: float = 0.2,
    learning_rate: float = 3e-3,
    batch_size: int = 256,
    updates_per_step: int = 30,
    memory_size: int = 4096,
    bandwidth: float = 0.5,
) -> "ValueModel":
    """A value model of one of `KINDS`.

    Args:
        hidden_size, n_layers: of each network.
        n_models: estimates of a value: networks, dropout masks or resamplings.
        dropout: share of hidden units dropped by kind `dropout`.
        learning_rate, batch_size, updates_per_step: AdamW steps after each `observe`.
        memory_size: steps remembered; the oldest go first. Kind `bootstrap` keeps 1,024 at most, as it compares with
            all of them.
        bandwidth: how far kind `bootstrap` looks, in standard deviations per feature.

    Raises:
        ValueError: an unknown kind, a number out of range.
    """
    if kind not in KINDS:
        raise ValueError(f"uncertainty kind {kind!r}: expected one of {list(KINDS)}")
    counts = {"n_features": n_features, "hidden_size": hidden_size, "n_layers": n_layers, "n_models": n_models}
    counts |= {"batch_size": batch_size, "updates_per_step": updates_per_step, "memory_size": memory_size}
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    if not 0 < dropout < 1 or learning_rate <= 0 or bandwidth <= 0:
        raise ValueError(
            f"dropout={dropout}, learning_rate={learning_rate}, bandwidth={bandwidth}: expected dropout between 0 and "
            "1, the others above 0"
        )
    if kind == "bootstrap":
        return BootstrapValueModel(n_features, seed, min(memory_size, COMPARED_ROWS), n_models, bandwidth)
    networks = Networks(
        n_features,
        hidden_size,
        n_layers,
        members=n_models if kind == "ensemble" else 1,
        prior=kind == "ensemble",
        dropout=dropout if kind == "dropout" else 0.0,
        n_masks=n_models,
        seed=seed,
    )
    return NetworkValueModel(networks, n_features, seed, memory_size, learning_rate, batch_size, updates_per_step)


def value_model_of(config: HATOConfig, seed: int) -> "ValueModel":
    """The one that `hato.uncertainty` and `hato.memory` describe, over `step_features`."""
    of = config.uncertainty
    return make_value_model(
        of.method,
        len(FEATURES),
        seed=seed,
        hidden_size=of.model_config.hidden_size,
        n_layers=of.model_config.n_layers,
        n_models=of.n_models if of.method == "ensemble" else of.n_passes,
        dropout=of.model_config.dropout,
        learning_rate=of.learning_rate,
        updates_per_step=of.n_updates,
        memory_size=config.memory.value_buffer_size,
        bandwidth=of.bandwidth,
    )


class ValueModel(ABC):
    """A memory of steps and their outcomes, and an estimate drawn from it.

    The last `memory_size` steps are kept, each with a Poisson(1) weight for every one of `resamplings` estimates: the
    bootstrap that can be done online (Oza & Russell, 2001).
    """

    def __init__(self, n_features: int, seed: int, memory_size: int, resamplings: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.memory_size = memory_size
        self.features_MF = torch.zeros(0, n_features)
        self.outcomes_M = torch.zeros(0)
        self.weights_MK = torch.zeros(0, resamplings)

    @torch.no_grad()
    def predict(self, features) -> tuple[torch.Tensor, torch.Tensor]:
        """Value in [0, 1] and uncertainty (0 or more) of each row of `features` (N, F): two float32 tensors (N,)."""
        features_NF = self._checked(features)
        estimates_KN = torch.cat([self._estimates(rows) for rows in features_NF.split(ROWS_AT_ONCE)], dim=1)
        value_N = estimates_KN.mean(0)
        return value_N, (estimates_KN - value_N).square().mean(0).sqrt()

    def observe(self, features, outcomes) -> None:
        """Learn that the steps `features` (N, F) lay on paths with `outcomes` (N,) in [0, 1].

        A step with several finished paths below counts once, with their mean. Of more than a quarter of the memory a
        random quarter is taken, so that one call never replaces all that was there.
        """
        features_NF = self._checked(features)
        outcomes_N = torch.as_tensor(outcomes, dtype=torch.float32)
        if outcomes_N.shape != features_NF.shape[:1]:
            raise ValueError(f"outcomes {tuple(outcomes_N.shape)}: expected one per row, ({len(features_NF)},)")
        if not ((outcomes_N >= 0) & (outcomes_N <= 1)).all():
            raise ValueError("an outcome lies outside [0, 1]")
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
        """All that a copy needs to go on exactly like this model; tensors, for torch.save."""
        memory = {"features": self.features_MF, "outcomes": self.outcomes_M, "weights": self.weights_MK}
        return {"memory": memory, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict) -> None:
        """Raises ValueError where the state is of a model with other features or another number of estimates."""
        memory = state["memory"]
        for name, own in (("features", self.features_MF), ("weights", self.weights_MK)):
            if memory[name].shape[1:] != own.shape[1:]:
                raise ValueError(f"{name} of the state are {tuple(memory[name].shape)}: expected (M, {own.shape[1]})")
        self.features_MF, self.outcomes_M, self.weights_MK = (
            memory[name][-self.memory_size :].clone() for name in ("features", "outcomes", "weights")
        )
        self.generator.set_state(state["generator"])

    def _checked(self, features) -> torch.Tensor:
        features = torch.as_tensor(features, dtype=torch.float32)
        if features.ndim != 2 or features.shape[1] != self.features_MF.shape[1]:
            raise ValueError(f"features {tuple(features.shape)}: expected (N, {self.features_MF.shape[1]})")
        if not features.isfinite().all():
            raise ValueError("a feature is not a finite number")
        return features

    @abstractmethod
    def _estimates(self, features_NF: torch.Tensor) -> torch.Tensor:
        """(K, N), each in [0, 1]."""


class NetworkValueModel(ValueModel):
    """Kinds `ensemble`, `dropout` and `none`: `networks` say how many estimates there are."""

    def __init__(
        self,
        networks: Networks,
        n_features: int,
        seed: int,
        memory_size: int,
        learning_rate: float,
        batch_size: int,
        updates_per_step: int,
    ):
        super().__init__(n_features, seed, memory_size, networks.members)
        self.networks = networks
        self.batch_size, self.updates_per_step = batch_size, updates_per_step
        self.optimizer = torch.optim.AdamW(networks.parameters(), lr=learning_rate, weight_decay=1e-2)

    def _estimates(self, features_NF: torch.Tensor) -> torch.Tensor:
        return self.networks.logits(features_NF).sigmoid()

    def observe(self, features, outcomes) -> None:
        super().observe(features, outcomes)
        for _ in range(self.updates_per_step if len(self.outcomes_M) else 0):
            rows = torch.randint(len(self.outcomes_M), (self.batch_size,), generator=self.generator)
            logits_KB = self.networks.logits_to_learn(self.features_MF[rows], self.generator)
            targets_KB = self.outcomes_M[rows].expand_as(logits_KB)
            weights_KB = self.weights_MK[rows].T
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits_KB, targets_KB, weights_KB)
            self.optimizer.zero_grad()
            (loss * len(logits_KB)).backward()  # each network's own mean
            self.optimizer.step()

    def state_dict(self) -> dict:
        return {
            **super().state_dict(),
            "networks": self.networks.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def load_state_dict(self, state: dict) -> None:
        super().load_state_dict(state)
        self.networks.load_state_dict(state["networks"])
        if "optimizer" in state:  # not where it only predicts
            self.optimizer.load_state_dict(state["optimizer"])


class BootstrapValueModel(ValueModel):
    """Kind `bootstrap`: a kernel-weighted mean of remembered outcomes, over resamplings of the memory.

    Each resampling also holds one made-up outcome that is near everything, of its own: they disagree where few steps
    are remembered, and agree where many are.
    """

    def __init__(self, n_features: int, seed: int, memory_size: int, resamplings: int, bandwidth: float):
        super().__init__(n_features, seed, memory_size, resamplings)
        self.bandwidth = bandwidth
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
        """exp(-d^2 / 2), d the root mean square over features of the difference in `bandwidth` deviations."""
        if not len(self.features_MF):
            return torch.zeros(len(features_NF), 0)
        scale_F = self.bandwidth * self.features_MF.std(0, correction=0).clamp(min=0.01)
        scale_F = scale_F * math.sqrt(self.features_MF.shape[1])
        a_NF, b_MF = features_NF / scale_F, self.features_MF / scale_F
        exponent = torch.addmm(-b_MF.square().sum(1)[None] / 2, a_NF, b_MF.T)
        return exponent.sub_(a_NF.square().sum(1, keepdim=True) / 2).clamp_(max=0).exp_()
