"""Lets verl 0.9.1 hand LoRA adapters to vLLM 0.30; for VERL_PLATFORM=cpu only, because vLLM 0.24 does not need it.

verl 0.9.1 calls `WeightsMapper.get_unstacked_mapper`, which vLLM 0.30 has renamed to `get_rename_mapper`, for every
vLLM from 0.25 on when it loads an adapter. This can go when verl calls the new name.
"""

from types import ModuleType

from vllm_patches.after_import import after_import


def _add_upstreams_name(models_utils: ModuleType) -> None:
    mapper = models_utils.WeightsMapper
    if hasattr(mapper, "get_rename_mapper"):  # vLLM 0.24, for which verl calls neither name, has neither
        mapper.get_unstacked_mapper = mapper.get_rename_mapper


def keep_the_mappers_old_name() -> None:
    """Give vLLM's `WeightsMapper`, once it is imported, its former method name again."""
    after_import("vllm.model_executor.models.utils", _add_upstreams_name)
