"""The switch `use_prefix_tree` of actor and reference policy, and checks of keys and models that do not go with it."""

from collections.abc import Mapping
from dataclasses import dataclass

from verl.utils.parts import parts
from verl.workers.config import FSDPActorConfig

# upstream's strategy -> name in upstream's registry of the engine that trains on prefix trees
STRATEGIES = {"fsdp": "fsdp_prefix_tree", "fsdp2": "fsdp2_prefix_tree"}
MODEL_TYPES = ("qwen2", "qwen3", "llama")
# values that these keys must have in the actor's section or in its fsdp_config
REQUIRED = {
    "ulysses_sequence_parallel_size": 1,
    "pad_to_length": False,
    "use_fused_kernels": False,
    "calculate_sum_pi_squared": False,
    "use_prefix_grouper": False,
    "shuffle": False,
}

SKIP_ZERO_ADVANTAGES = "skip_zero_advantages"  # entry of a mini-batch: rows whose advantages are all 0 are not computed
TRAINED_TOKEN_SHARE = "perf/trained_token_share"  # share of tokens whose rows were computed
UNIQUE_TOKEN_SHARE = "perf/unique_token_share"  # share of these tokens that went through the model


@dataclass
class PrefixTreeActorConfig(FSDPActorConfig):
    """Upstream's FSDP config of the actor and of the reference policy, with the switch `use_prefix_tree`."""

    use_prefix_tree: bool = False  # whether a prefix that rows of a micro-batch share goes through the model only once

    def __post_init__(self):
        super().__post_init__()
        if self.use_prefix_tree:
            check_section(self)
            object.__setattr__(self.engine, "strategy", STRATEGIES[self.strategy])


def check_section(section) -> None:
    """Check that the other keys of the actor's or the reference policy's section, typed or not, allow
    `use_prefix_tree=true`."""
    if section.strategy not in STRATEGIES:
        raise ValueError(f"use_prefix_tree=true with strategy={section.strategy}: expected {' or '.join(STRATEGIES)}")
    for prefix, part in (("", section), ("fsdp_config.", section.fsdp_config)):
        for key, value in REQUIRED.items():
            if part.get(key, value) != value:
                name, required = prefix + key, str(value).lower()
                raise ValueError(f"use_prefix_tree=true with {name}={part.get(key)}: set {name}={required}")


def check_model_config(model: Mapping) -> None:
    """Check that a model of `transformers` can be computed on a prefix tree, from the content of its config.json."""
    if model.get("model_type") not in MODEL_TYPES:
        raise ValueError(
            f"use_prefix_tree=true with a model of type {model.get('model_type')}: expected {', '.join(MODEL_TYPES)}"
        )
    if model.get("use_sliding_window") or "sliding_attention" in (model.get("layer_types") or ()):
        raise ValueError("use_prefix_tree=true with a model whose layers have a sliding window: not supported")
    if model.get("attention_dropout"):
        raise ValueError(
            f"use_prefix_tree=true with attention_dropout={model['attention_dropout']}: set "
            "+actor_rollout_ref.model.override_config.attention_dropout=0"
        )


def skips_zero_advantages(actor) -> bool:
    """Return whether rows whose advantages are all 0 add nothing to the actor's loss, gradient or entropy metrics, so
    that the prefix-tree engine may leave them out. `actor` is the actor's section, typed or not."""
    # With this aggregation upstream divides by the width of each micro-batch, which rows without advantages may widen.
    loss = parts("loss").get(actor.policy_loss.loss_mode)
    by_width = actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None
    return (
        actor.get("use_prefix_tree", False)
        and not by_width
        and loss is not None
        and loss.proportional
        and actor.entropy_coeff == 0
        and not actor.calculate_entropy
        and not actor.use_kl_loss
    )
