"""Upstream's policy loss, `loss=vanilla`."""

from verl.utils.parts import describe_loss

describe_loss("vanilla", "Dual-clip PPO over all tokens alike", proportional=True)
