"""A repair that lets verl 0.9.1 hand LoRA adapters to vLLM 0.30.

It is for VERL_PLATFORM=cpu only, because the GPU profile's vLLM 0.24 does not need it.
"""

from types import ModuleType

from vllm_patches.after_import import after_import


def _add_upstreams_name(models_utils: ModuleType) -> None:
    """Give `WeightsMapper` the method `get_unstacked_mapper`, which vLLM 0.30 has renamed to `get_rename_mapper`.

    verl 0.9.1 calls the old name for every vLLM from 0.25 on when it loads an adapter. This can go when verl calls the
    new name.
    """
    mapper = models_utils.WeightsMapper
    if hasattr(mapper, "get_rename_mapper"):  # vLLM 0.24, for which verl calls neither name, has neither
        mapper.get_unstacked_mapper = mapper.get_rename_mapper


def keep_the_mappers_old_name() -> None:
    """Give vLLM's `WeightsMapper`, once it is imported, its former method name `get_unstacked_mapper` again."""
    after_import("vllm.model_executor.models.utils", _add_upstreams_name)
