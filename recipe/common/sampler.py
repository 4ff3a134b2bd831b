"""Ordinary sampling at a fixed temperature, `sampler=plain`."""

from verl.utils.parts import register_sampler

register_sampler("plain", "vLLM samples at the temperature of the config", values={"adaptive_temperature": False})
