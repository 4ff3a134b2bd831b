"""vLLM's V2 sampler, which is the GPUs', with our change of it, on CPU tensors, in Triton's interpreter.

    TRITON_INTERPRET=1 PYTHONPATH=<triton>[:<another vLLM>] python tests/workers/rollout/v2_sampler.py < batches.json

Standard input: {"mode": vLLM's logprobs_mode, "batches": [...]}; a batch is a list of {"logits": one row, "params": of
`SamplingParams`, "slot": the request's place in the sampler's state, "position": of the newest token in its sequence,
and, if other requests have had the slot, "earlier": the list of their params}.
Standard output's last line: for each request {"token": what was sampled} and, in a batch that asks for log-probs,
"token_ids" and "logprobs" of its `FlatLogprobs`, as vLLM's own processor fills them.

Stand-ins, as there is no GPU: pinned memory is ordinary memory; `libdevice.log1p`, which the interpreter lacks, is
computed in float64; top-k and top-p are vLLM's in PyTorch, because the interpreter hands scalars to the kernel that
does both as plain numbers ("'int' object has no attribute 'to'").
"""

import functools
import json
import sys
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.backends
import triton.language as tl

from vllm_patches import cpu_version_name
from vllm_patches.v2_adaptive_temperature import temper_v2_sampler

# as in vLLM's own CPU build with Triton's CPU backend: else vLLM takes Triton for unusable here
cpu_version_name.install()
triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from vllm import SamplingParams  # noqa: E402
from vllm.triton_utils import HAS_TRITON  # noqa: E402
from vllm.v1.engine import EngineCoreOutput  # noqa: E402
from vllm.v1.engine.logprobs import LogprobsProcessor  # noqa: E402
from vllm.v1.outputs import LogprobsLists  # noqa: E402
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch  # noqa: E402
from vllm.v1.worker.gpu import buffer_utils  # noqa: E402
from vllm.v1.worker.gpu.sample import gumbel, sampler  # noqa: E402
from vllm.v1.worker.gpu.states import RequestState  # noqa: E402

temper_v2_sampler()

SLOTS, LONGEST = 8, 64  # of the sampler's state; positions are free


@triton.jit
def _log1p(x):
    return tl.log(1 + x.to(tl.float64)).to(tl.float32)


def _stand_in() -> None:
    zeros = torch.zeros
    torch.zeros = lambda *sizes, pin_memory=False, **options: zeros(*sizes, **options)
    buffer_utils.get_accelerator_view_from_cpu_tensor = lambda memory: memory
    gumbel.tldevice = SimpleNamespace(log1p=_log1p)
    filtered = functools.partial(apply_top_k_top_p_pytorch, allow_cpu_sync=True)
    sampler.apply_top_k_top_p = lambda logits, k, p: logits if k is None and p is None else filtered(logits, k, p)


def _sample(batch: list[dict], mode: str):
    """vLLM's `SamplerOutput` of one decode step."""
    logits = torch.tensor([request["logits"] for request in batch])
    slots = torch.tensor([request["slot"] for request in batch], dtype=torch.int32)
    n, (_, vocab_size), device = len(batch), logits.shape, torch.device("cpu")
    capacity = max(SLOTS, n)
    states = RequestState(capacity, LONGEST, LONGEST, 1, vocab_size, device)
    sample = sampler.Sampler(capacity, vocab_size, device, states, logprobs_mode=mode)
    for request in batch:
        for params in (*request.get("earlier", []), request["params"]):
            sample.add_request(request["slot"], 1, SamplingParams(**params))
            sample.apply_staged_writes()
    rows = torch.arange(n)
    inputs = SimpleNamespace(
        num_reqs=n,
        idx_mapping=slots,
        idx_mapping_np=slots.numpy(),
        expanded_idx_mapping=slots,
        expanded_local_pos=torch.zeros(n, dtype=torch.int32),
        cu_num_logits=torch.arange(n + 1, dtype=torch.int32),
        cu_num_logits_np=np.arange(n + 1),
        positions=torch.tensor([request["position"] for request in batch]),
        input_ids=torch.zeros(n, dtype=torch.int32),
        logits_indices=rows,
        seq_lens=torch.ones(n, dtype=torch.int32),
    )
    return sample(logits, inputs)


def _reported(request: dict, lists: LogprobsLists, row: int):
    """The request's `FlatLogprobs` after this step."""
    params = SamplingParams(**request["params"], flat_logprobs=True)
    processor = LogprobsProcessor.from_new_request(None, SimpleNamespace(sampling_params=params))
    of_row = lists._replace(**{name: getattr(lists, name)[row : row + 1] for name in lists._fields[:3]})
    processor.update_from_output(EngineCoreOutput(request_id="", new_token_ids=[], new_logprobs=of_row))
    return processor.logprobs


def main() -> None:
    assert HAS_TRITON, "vLLM takes Triton for unusable"
    _stand_in()
    job, results = json.load(sys.stdin), []
    for batch in job["batches"]:
        output = _sample(batch, job["mode"])
        found = [{"token": token} for token in output.sampled_token_ids[:, 0].tolist()]
        if output.logprobs_tensors is not None:
            lists = output.logprobs_tensors.tolists()
            for row, request in enumerate(batch):
                flat = _reported(request, lists, row)
                found[row] |= {"token_ids": flat.token_ids, "logprobs": flat.logprobs}
        results.append(found)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
