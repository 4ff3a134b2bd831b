"""What adaptive temperature adds to vLLM's sampler, per decode step.

    python benchmarks/adaptive_temperature.py [--device cuda] [--batches 1 16 64 256] [--vocabularies 32000 152000]

vLLM's own V1 `Sampler` on float32 logits with the log-probs of the sampled tokens, as verl asks for them: alone
(baseline), with the processor loaded but no request asking, and with every request asking. The three alternate within
every repeat. Writes benchmarks/results/adaptive_temperature_<device>.md.
"""

import argparse
import os
import statistics
import time

import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from benchmarks.report import write_report
from vllm_patches.adaptive_temperature import AdaptiveTemperature

SETTINGS = {"temperature_tau": 0.05, "median": -0.1, "std": 3.0, "scale_pos": 5.0, "scale_neg": 0.5}


def metadata(batch: int, device: torch.device, processors: list) -> SamplingMetadata:
    """A batch of ordinary training rollouts at temperature 1."""
    empty = torch.empty(0, device=device)
    return SamplingMetadata(
        temperature=torch.ones(batch, device=device),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=empty,
        presence_penalties=empty,
        repetition_penalties=empty,
        output_token_ids=[[] for _ in range(batch)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(processors),
    )


def processor(batch: int, device: torch.device, asking: bool) -> AdaptiveTemperature:
    loaded = AdaptiveTemperature(None, device, False)
    params = SamplingParams(extra_args={"adaptive_temperature": SETTINGS} if asking else None)
    loaded.update_state(BatchUpdate(batch, [], [(row, params, [1], []) for row in range(batch)], []))
    return loaded


def milliseconds(sampler: Sampler, logits: torch.Tensor, sampling: SamplingMetadata) -> float:
    work = logits.clone()  # the sampler writes into its input
    if logits.is_cuda:
        torch.cuda.synchronize()
    started = time.perf_counter()
    sampler(work, sampling)
    if logits.is_cuda:
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_000, 152_000])
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    device = torch.device(args.device)
    sampler = Sampler(logprobs_mode="processed_logprobs").to(device)
    rows = []
    for vocabulary in args.vocabularies:
        for batch in args.batches:
            logits = 3 * torch.randn(batch, vocabulary, device=device)
            kinds = [[], [processor(batch, device, asking=False)], [processor(batch, device, asking=True)]]
            batches = [metadata(batch, device, processors) for processors in kinds]
            times = [[milliseconds(sampler, logits, one) for one in batches] for _ in range(args.repeats + 2)][2:]
            alone, loaded, asking = (statistics.median(column) for column in zip(*times, strict=True))
            rows.append(
                (f"{vocabulary:,}", str(batch), f"{alone:.2f}", f"{loaded:.2f}", f"{asking:.2f}")
                + (f"{loaded / alone:.2f}", f"{asking / alone:.2f}")
            )
    write_report(
        f"adaptive_temperature_{device.type}",
        f"Milliseconds of one sampler step, median of {args.repeats} alternating repeats after 2 to warm up; "
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores.",
        ("vocabulary", "batch", "sampler alone", "loaded", "all asking", "loaded / alone", "asking / alone"),
        rows,
    )


if __name__ == "__main__":
    main()
