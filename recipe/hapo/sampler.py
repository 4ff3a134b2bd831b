"""HAPO's sampler (arXiv 2509.16591), `sampler=tempered`: a token's temperature follows its entropy.

recipe/hapo/component.py sends the sampler's settings with the prompts, and vLLM's processes read them
(vllm_patches/tempered_requests.py). h in [-1, 1] is the token's normalized entropy (recipe/hapo/normalized_entropy.py).
"""

from pydantic import Field
from pydantic.dataclasses import dataclass

from recipe.hapo.normalized_entropy import ENTROPY_H
from verl.utils.parts import register_sampler
from verl.workers.config.keys import ROLLOUT, STRICT


@dataclass(frozen=True, config=STRICT)
class TemperedKeys:
    """Keys under actor_rollout_ref.rollout.

    Args:
        adaptive_temperature: whether training rollouts, but never validation, sample at T (1 + temperature_tau h).
        temperature_tau: largest relative change of the temperature; 0 turns it off.
    """

    adaptive_temperature: bool = False
    temperature_tau: float = Field(default=0.05, ge=0, lt=1)


def check_temperature(config) -> None:
    """Check that the run samples at temperature 1, the one at which the sampler computes its entropies."""
    if (temperature := config.actor_rollout_ref.rollout.temperature) != 1:
        raise ValueError(
            f"{ROLLOUT}.adaptive_temperature needs {ROLLOUT}.temperature=1, not {temperature}: the "
            "statistics are of entropies at that temperature, the sampler's entropies of raw logits"
        )


register_sampler(
    "tempered",
    "HAPO: training rollouts sample at T (1 + temperature_tau h), h of the token's entropy under the last step's "
    "statistics",
    requires="actor_rollout_ref.rollout.temperature=1, and no algorithm.rollout_correction.bypass_mode",
    keys=TemperedKeys,
    values={"adaptive_temperature": True, "temperature_tau": 0.05},
    smallest={"actor_rollout_ref.rollout.temperature_tau": 0.5},
    is_on=lambda rollout: bool(rollout.get("adaptive_temperature") and rollout.get("temperature_tau")),
    needs=(ENTROPY_H,),
    checks=check_temperature,
)
