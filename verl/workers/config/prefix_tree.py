"""The switch `use_prefix_tree` of actor and reference policy, and what cannot be trained on a prefix tree."""

from dataclasses import dataclass

from verl.utils.parts import parts
from verl.workers.config import FSDPActorConfig

# upstream's strategy -> the name under which upstream's registry has the engine that trains on the tree
STRATEGIES = {"fsdp": "fsdp_prefix_tree", "fsdp2": "fsdp2_prefix_tree"}
# keys that must have these values, in the actor's section or in its fsdp_config
REQUIRED = {
    "ulysses_sequence_parallel_size": 1,
    "pad_to_length": False,
    "use_fused_kernels": False,
    "calculate_sum_pi_squared": False,
    "use_prefix_grouper": False,
    "shuffle": False,
}


# the entry of a mini-batch that says that rows whose advantages are all 0 need not be computed
SKIP_ZERO_ADVANTAGES = "skip_zero_advantages"
# metrics: the share of the tokens whose rows were computed; of these tokens, the share that went through the model
TRAINED_TOKEN_SHARE = "perf/trained_token_share"
UNIQUE_TOKEN_SHARE = "perf/unique_token_share"


@dataclass
class PrefixTreeActorConfig(FSDPActorConfig):
    """Upstream's FSDP actor config, which is the reference policy's too, and a switch.

    Args:
        use_prefix_tree: tokens that rows of a micro-batch share as prefixes go through the model once.
    """

    use_prefix_tree: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.use_prefix_tree:
            check_section(self)
            object.__setattr__(self.engine, "strategy", STRATEGIES[self.strategy])


def check_section(section) -> None:
    """Check the actor's or the reference policy's section, typed or not.

    Raises:
        ValueError: a key does not go with the switch.
    """
    if section.strategy not in STRATEGIES:
        raise ValueError(f"use_prefix_tree=true with strategy={section.strategy}: expected {' or '.join(STRATEGIES)}")
    for prefix, part in (("", section), ("fsdp_config.", section.fsdp_config)):
        for key, value in REQUIRED.items():
            if part.get(key, value) != value:
                name, wanted = prefix + key, str(value).lower()
                raise ValueError(f"use_prefix_tree=true with {name}={part.get(key)}: set {name}={wanted}")


def skips_zero_advantages(actor) -> bool:
    """Whether a row without advantages adds nothing to the actor's loss, gradient or metrics of entropy, so that an
    engine for prefix trees leaves it out. `actor` is the actor's section, typed or not."""
    # upstream then divides by the width of each micro-batch, to which rows without advantages add
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
