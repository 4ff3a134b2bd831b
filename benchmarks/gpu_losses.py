"""HAPO's and AEPO's losses as verl's workers call them: on a mini-batch of jagged nested tensors. Needs verl."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import verl.workers.utils.losses as upstream
from tensordict import TensorDict
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config.actor import FSDPActorConfig, PolicyLossConfig

from verl.workers.config.explore import ExploreActorConfig
from verl.workers.utils.field_losses import ppo_loss_with_fields


class LossBatch(NamedTuple):
    """Log-probs (all tokens,) of prompts and responses, whose rows begin at `offsets`, and the rows' fields, `data`."""

    log_probs: torch.Tensor
    offsets: torch.Tensor
    data: TensorDict

    @property
    def tokens(self) -> int:
        """Return the number of response tokens."""
        return self.data["response_mask"].values().numel()


def loss_batch(sequences: int, longest: int, device: torch.device | str, dtype: torch.dtype) -> LossBatch:
    """Return a seeded mini-batch with the same numbers on every device; its floats have this dtype."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, longest // 8 + 1, (sequences,), generator=generator)
    responses = torch.randint(1, longest - longest // 8 + 1, (sequences,), generator=generator)

    def nested(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Make a tensor from a list of rows, as verl does: it then knows its longest row, to which it is padded."""
        rows = values.to(dtype if values.is_floating_point() else values.dtype).split(lengths.tolist())
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged).to(device)

    def noise(size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    size = int(responses.sum())
    log_probs = -noise(int((prompts + responses).sum())).square()
    data = TensorDict(
        {
            "prompts": nested(torch.ones(int(prompts.sum()), dtype=torch.long), prompts),
            "responses": nested(torch.ones(size, dtype=torch.long), responses),
            # a tenth of the tokens comes from a tool
            "response_mask": nested((torch.rand(size, generator=generator) < 0.9).long(), responses),
            "old_log_probs": nested(_response_part(log_probs, prompts, responses) + 0.3 * noise(size), responses),
            "advantages": nested(noise(size), responses),
            "entropy_h": nested(noise(size).tanh(), responses),
            "standardised_entropy": nested(noise(size), responses),
        },
        batch_size=[sequences],
    )
    tokens = int(data["response_mask"].values().sum())
    assign_non_tensor(data, dp_size=1, batch_num_tokens=tokens, global_batch_size=sequences)
    offsets = torch.nn.functional.pad((prompts + responses).cumsum(0), (1, 0))
    return LossBatch(log_probs.to(device, dtype), offsets.to(device), data)


def _response_part(log_probs: torch.Tensor, prompts: torch.Tensor, responses: torch.Tensor) -> torch.Tensor:
    """Return the log-probs of the responses' tokens; each token's log-prob stands at the position before it."""
    rows = log_probs.split((prompts + responses).tolist())
    return torch.cat([row[-n - 1 : -1] for row, n in zip(rows, responses.tolist(), strict=True)])


def loss_functions() -> dict[str, Callable[[LossBatch], tuple[torch.Tensor, torch.Tensor]]]:
    """Return by name functions from a batch to the loss and its gradient with respect to `log_probs`."""
    common = {"strategy": "fsdp2", "rollout_n": 1, "use_dynamic_bsz": True, "clip_ratio_high": 0.28}
    hapo = {"adaptive_clip": True, "adaptive_advantage": True, "policy_loss": PolicyLossConfig(loss_mode="hapo")}
    aepo = {"enable_entropy_balanced_clipping": True, "enable_entropy_balanced_advantage": True}
    aepo |= {"policy_loss": PolicyLossConfig(loss_mode="aepo")}
    losses = {
        "vanilla": (upstream.ppo_loss, FSDPActorConfig(**common)),
        "hapo": (partial(ppo_loss_with_fields, fields=["entropy_h"]), ExploreActorConfig(**common, **hapo)),
        "aepo": (partial(ppo_loss_with_fields, fields=["standardised_entropy"]), ExploreActorConfig(**common, **aepo)),
    }

    def with_gradient(loss: Callable, config: FSDPActorConfig) -> Callable:
        def loss_and_gradient(batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor]:
            leaf = batch.log_probs.clone().requires_grad_()
            nested = torch.nested.nested_tensor_from_jagged(leaf, batch.offsets)
            value, _ = loss(config, {"log_probs": nested}, batch.data)
            return value.detach(), torch.autograd.grad(value, leaf)[0]

        return loss_and_gradient

    return {name: with_gradient(*pair) for name, pair in losses.items()}
