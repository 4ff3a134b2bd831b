"""Upstream's policy losses as choices of `loss=`; `vanilla` is its default.

Each takes an advantage for each token, so that it works with all credits. `geo_mean`, which averages advantages over a
row, `dro` and `gpg` are no choices.

The values are the papers' where upstream's general defaults make another method: GSPO hardly clips with a range of 0.2,
CISPO bounds ratios from above only, and for DPPO `clip_ratio_low` and `clip_ratio_high` are thresholds of a divergence.
"""

from verl.utils.parts import describe_loss

BY_ROWS = {"loss_agg_mode": "seq-mean-token-mean"}

describe_loss("vanilla", "Dual-clip PPO over all tokens alike", proportional=True)
describe_loss(
    "gspo",
    "GSPO (arXiv 2507.18071): the ratio of a whole response, its geometric mean over tokens, is clipped",
    values={**BY_ROWS, "clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4},
    proportional=True,
)
describe_loss(
    "cispo",
    "CISPO (arXiv 2506.13585): the ratio is a weight without gradient, clipped from above, so that every token trains",
    values={"clip_ratio_low": 1.0, "clip_ratio_high": 0.2},  # 1 - 1 = 0 bounds nothing
    proportional=True,
)
describe_loss(
    "sapo",
    "SAPO (arXiv 2511.20347): a sigmoid gate of the ratio in place of a clip; tau_pos and tau_neg are its temperatures",
    values=BY_ROWS,  # upstream's function averages like this whatever the key says
    proportional=True,
)
describe_loss(
    "dppo_tv",
    "DPPO (arXiv 2602.04879): no gradient where a token's probability has moved by more than a threshold",
    values={"clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20.0},
    proportional=True,
)
describe_loss(
    "dppo_kl",
    "DPPO (arXiv 2602.04879): no gradient where the KL divergence of a token's probability is above a threshold",
    values={"clip_ratio_low": 0.05, "clip_ratio_high": 0.05, "clip_ratio_c": 20.0},
    proportional=True,
)

BY_MICRO_BATCH = (
    "upstream selects tokens by their covariance within each micro-batch: the size of micro-batches and update=tree "
    "change the loss, so compare only runs in which both are equal"
)
describe_loss(
    "clip_cov",
    "Clip-Cov (arXiv 2505.22617): a few random tokens whose log-prob and advantage covary have no gradient",
    warning=BY_MICRO_BATCH,
)
describe_loss(
    "kl_cov",
    "KL-Cov (arXiv 2505.22617): no clip, and a KL penalty on the tokens whose log-prob and advantage covary most",
    warning=BY_MICRO_BATCH,
)
