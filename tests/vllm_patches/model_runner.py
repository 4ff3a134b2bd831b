"""Tells which model runner vLLM chooses on a GPU, without a GPU.

It runs vLLM's own command line, config classes and CUDA platform.

    [PYTHONPATH=<another vLLM>] python tests/vllm_patches/model_runner.py < cases.json

Standard input: a list of {"architecture", "model_type", "arguments": of `vllm serve`}. Standard output's last line: for
each {"v2": whether it is the V2 runner, "asynchronous": whether scheduling is, "fits_a_graph": whether a CUDA graph is
captured for `max_num_seqs` sequences}. vLLM's warnings stand before it.

Stand-ins: native modules are empty, Triton is said to be there, the device to be an H100, and a small class stands for
the model's, whose import needs CUDA kernels.
"""

import json
import sys
import types
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

import vllm_patches
from vllm_patches import cpu_version_name

cpu_version_name.install()
for name in ("_C", "_C_stable_libtorch"):
    sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")

import vllm.platforms  # noqa: E402
from vllm.platforms.cuda import NonNvmlCudaPlatform  # noqa: E402
from vllm.platforms.interface import DeviceCapability  # noqa: E402


class H100(NonNvmlCudaPlatform):
    @classmethod
    def get_device_capability(cls, device_id=0):
        return DeviceCapability(9, 0)

    @classmethod
    def get_device_name(cls, device_id=0):
        return "NVIDIA H100 80GB HBM3"

    @classmethod
    def get_device_total_memory(cls, device_id=0):
        return 80 << 30

    @classmethod
    def device_count(cls):
        return 8

    def is_cumem_allocator_available(self):
        return True


vllm.platforms._current_platform = H100()

import vllm.config.vllm  # noqa: E402
from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: E402

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256, "max_position_embeddings": 2**15}


class Decoder(torch.nn.Module):
    """A text model as vLLM tells it from others."""

    def __init__(self, vllm_config=None, prefix=""): ...

    def embed_input_ids(self, input_ids): ...

    def forward(self, input_ids, positions): ...

    def compute_logits(self, hidden_states): ...


def config_of(case: dict, folder: Path):
    """vLLM's config of an engine."""
    text = {"architectures": [case["architecture"]], "model_type": case["model_type"], "dtype": "bfloat16", **SIZES}
    (folder / "config.json").write_text(json.dumps(text))
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    arguments = parser.parse_args(["--model", str(folder), *case["arguments"]])
    return AsyncEngineArgs.from_cli_args(arguments).create_engine_config()


def main() -> None:
    vllm_patches.register()
    vllm.config.vllm.HAS_TRITON = True
    information = registry._ModelInfo.from_model_cls(Decoder)
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: information
    results = []
    for case in json.load(sys.stdin):
        with TemporaryDirectory() as folder:
            config = config_of(case, Path(folder))
        asynchronous = config.scheduler_config.async_scheduling
        fits = config.scheduler_config.max_num_seqs <= config.compilation_config.max_cudagraph_capture_size
        results.append({"v2": config.use_v2_model_runner, "asynchronous": asynchronous, "fits_a_graph": fits})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
