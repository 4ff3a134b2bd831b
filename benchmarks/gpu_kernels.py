"""What a GPU does at real size with the tensors that this project computes on: time, memory, error against float64.

    python -m benchmarks.gpu_kernels [--repeats 7] [--output]        # a machine with one GPU
    python -m benchmarks.gpu_kernels --device cpu --small            # seconds, anywhere: does it run at all?

Needs torch and transformers only; the two losses also need verl and say so where it is missing. The first case of each
block is the baseline that the others are compared with. --output writes benchmarks/results/gpu_kernels.md.
"""

import copy
import gc
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import transformers

from benchmarks.gpu_timing import HEADER, WARM_UP, Block, Case, rows_of
from benchmarks.report import parser_of, report_text, write_report
from verl.trainer.ppo.normalized_entropy import compute_entropy_based_temperature, entropy_of_logits

HAPO = {"temperature_tau": 0.05, "median": -0.1, "std": 3.0, "scale_pos": 1.0, "scale_neg": 0.5}


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes; the defaults are those of training Qwen2.5-7B."""

    tokens: int = 16_384
    vocabulary: int = 152_064
    chunk: int = 2_048
    decoded_rows: tuple[int, ...] = (64, 256, 1024)
    sequences: int = 512
    longest: int = 8_192
    hidden: int = 3_584
    heads: int = 28
    kv_heads: int = 4
    intermediate: int = 18_944
    layer_batch: tuple[int, int] = (2, 4_096)


SMALL = Sizes(
    **{"tokens": 64, "vocabulary": 1_000, "chunk": 16, "decoded_rows": (4, 8), "sequences": 6, "longest": 40},
    **{"hidden": 64, "heads": 4, "kv_heads": 2, "intermediate": 128, "layer_batch": (2, 32)},
)


def random_logits(rows: int, vocabulary: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """(rows, vocabulary) logits, from nearly uniform rows to nearly certain ones."""
    spread = torch.linspace(0.1, 12, rows, device=device).unsqueeze(-1)
    return torch.randn(rows, vocabulary, device=device, dtype=dtype).mul_(spread)


def softmax_entropy(logits: torch.Tensor) -> torch.Tensor:
    """Entropy (R,) in the dtype of the logits: log sum e^x - sum p x."""
    return logits.logsumexp(-1) - (logits.softmax(-1) * logits).sum(-1)


def largest_difference(result: torch.Tensor, exact: torch.Tensor) -> tuple[float]:
    return ((result.double() - exact).abs().max().item(),)


def relative_difference(result: torch.Tensor, exact: torch.Tensor) -> float:
    """Norm of the difference over the norm of `exact`; on the CPU."""
    exact = exact.detach().double().cpu()
    return ((result.detach().double().cpu() - exact).norm() / exact.norm()).item()


def entropy_block(sizes: Sizes, device: torch.device) -> Block:
    logits = random_logits(sizes.tokens, sizes.vocabulary, device, torch.bfloat16)
    some = slice(None, None, max(sizes.tokens // 64, 1))
    exact = softmax_entropy(logits[some].double())

    def chunked(entropy: Callable) -> Callable:
        return lambda: torch.cat([entropy(part) for part in logits.split(sizes.chunk)])

    def error(entropy: torch.Tensor) -> tuple[float]:
        return largest_difference(entropy[some], exact)

    cases = [
        Case("softmax, at once in bf16", lambda: softmax_entropy(logits), error),
        Case(f"softmax, float32 in chunks of {sizes.chunk:,}", chunked(lambda p: softmax_entropy(p.float())), error),
        Case(f"one exponential a logit, chunks of {sizes.chunk:,}", chunked(entropy_of_logits), error),
    ]
    return Block(f"entropy, {sizes.tokens:,} x {sizes.vocabulary:,} bf16", sizes.tokens, cases)


def temperature_block(rows: int, sizes: Sizes, device: torch.device) -> Block:
    logits = random_logits(rows, sizes.vocabulary, device, torch.float32)
    some = slice(None, None, max(rows // 64, 1))
    wide = logits[some].double()
    z = (softmax_entropy(wide).clamp(min=1e-6).log() - HAPO["median"]) / HAPO["std"]
    h = (z * torch.where(z > 0, HAPO["scale_pos"], HAPO["scale_neg"])).clamp(-1, 1)
    exact = 1 + HAPO["temperature_tau"] * h
    cases = [
        Case("softmax", lambda: logits.softmax(-1), lambda p: largest_difference(p[some], wide.softmax(-1))),
        Case(
            "adaptive temperature",
            lambda: compute_entropy_based_temperature(logits, **HAPO),
            lambda temperature: largest_difference(temperature[some], exact),
        ),
    ]
    return Block(f"HAPO's decode step, {rows:,} x {sizes.vocabulary:,} float32", rows, cases)


def log_prob_block(sizes: Sizes, device: torch.device) -> Block:
    logits = random_logits(sizes.tokens, sizes.vocabulary, device, torch.bfloat16)
    labels = torch.randint(sizes.vocabulary, (sizes.tokens, 1), device=device)
    labels[::2] = logits[::2].argmax(-1, keepdim=True)
    some = slice(None, None, max(sizes.tokens // 64, 1) | 1)  # odd: both kinds of label are among them
    exact = logits[some].double().log_softmax(-1).gather(-1, labels[some])

    def by_logsumexp(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return part.gather(-1, label) - part.logsumexp(-1, keepdim=True)

    def chunked() -> torch.Tensor:
        parts = zip(logits.split(sizes.chunk), labels.split(sizes.chunk), strict=True)
        return torch.cat([by_logsumexp(part.float(), label) for part, label in parts])

    def error(log_probs: torch.Tensor) -> tuple[float]:
        return largest_difference(log_probs[some], exact)

    wide = {"dim": -1, "dtype": torch.float32}
    cases = [
        Case("log_softmax + gather, bf16", lambda: logits.log_softmax(-1).gather(-1, labels), error),
        Case("log_softmax + gather, float32", lambda: torch.log_softmax(logits, **wide).gather(-1, labels), error),
        Case("logit - logsumexp, bf16", lambda: by_logsumexp(logits, labels), error),
        Case(f"logit - logsumexp, float32 in chunks of {sizes.chunk:,}", chunked, error),
    ]
    return Block(f"log-probs of labels, {sizes.tokens:,} x {sizes.vocabulary:,} bf16", sizes.tokens, cases)


def loss_block(sizes: Sizes, device: torch.device) -> Block:
    """Raises ImportError where verl, or something that it needs, is not installed."""
    from benchmarks.gpu_losses import loss_batch, loss_functions

    batch, on_cpu = (
        loss_batch(sizes.sequences, sizes.longest, *of) for of in ((device, torch.float32), ("cpu", torch.float64))
    )

    def case_of(name: str, loss_and_gradient: Callable) -> Case:
        def error(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, ...]:
            exact = loss_and_gradient(on_cpu)
            return tuple(relative_difference(part, of) for part, of in zip(result, exact, strict=True))

        return Case(name, lambda: loss_and_gradient(batch), error)

    what = f"loss with its gradient, {sizes.sequences} sequences of up to {sizes.longest:,} tokens, jagged"
    return Block(what, batch.tokens, [case_of(*named) for named in loss_functions().items()])


def layer_block(sizes: Sizes, device: torch.device) -> Block:
    config = transformers.Qwen2Config(
        **{"hidden_size": sizes.hidden, "intermediate_size": sizes.intermediate, "num_hidden_layers": 2},
        **{"num_attention_heads": sizes.heads, "num_key_value_heads": sizes.kv_heads, "vocab_size": 8},
    )
    with device:
        models = {
            name: transformers.AutoModel.from_config(config, attn_implementation=name, dtype=torch.bfloat16)
            for name in ("eager", "sdpa")
        }
    models["eager"].load_state_dict(models["sdpa"].state_dict())
    inputs = torch.randn(*sizes.layer_batch, sizes.hidden, device=device, dtype=torch.bfloat16)
    # attention is causal: the first positions do not depend on the others
    first = inputs[:1, :64]
    with torch.no_grad():
        exact = copy.deepcopy(models["sdpa"]).double()(inputs_embeds=first.double(), use_cache=False)[0]

    def forward_and_backward(model: torch.nn.Module) -> torch.Tensor:
        hidden = model(inputs_embeds=inputs, use_cache=False)[0]
        torch.autograd.grad(hidden.float().square().mean(), list(model.layers.parameters()))
        return hidden.detach()

    def case_of(name: str, model: torch.nn.Module) -> Case:
        return Case(
            f"{name} attention",
            lambda: forward_and_backward(model),
            lambda hidden: (relative_difference(hidden[:1, :64], exact),),
        )

    what = f"2 layers of Qwen2, width {sizes.hidden:,}, bf16, forward and backward"
    return Block(what, math.prod(sizes.layer_batch), [case_of(*named) for named in models.items()])


def all_rows(sizes: Sizes, device: torch.device, repeats: int) -> Iterator[tuple[str, ...]]:
    """Rows of the table, block after block, so that the memory of one is free before the next."""
    builders = {"entropy": entropy_block}
    builders |= {f"HAPO's decode step, {rows:,}": partial(temperature_block, rows) for rows in sizes.decoded_rows}
    builders |= {"log-probs": log_prob_block, "HAPO's and AEPO's losses": loss_block, "layers": layer_block}
    for name, build in builders.items():
        try:
            yield from rows_of(build(sizes, device), device, repeats)
        except ImportError as error:
            yield name, "", f"not measured: verl is not installed ({error})", "", "", "", ""
        except torch.OutOfMemoryError:
            yield name, "", "not measured: its inputs need more memory", "", "", "", ""
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of(__doc__, device="cuda", repeats=7)
    parser.add_argument("--small", action="store_true", help="sizes for a test on a CPU")
    parser.add_argument("--output", action="store_true", help="write benchmarks/results/gpu_kernels.md")
    args = parser.parse_args()
    device = torch.device(args.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device; --device cpu --small runs anywhere")
    if args.output and (device.type != "cuda" or args.small):
        parser.error("--output is for a GPU's figures at real sizes")
    torch.manual_seed(0)
    rows = list(all_rows(SMALL if args.small else Sizes(), device, args.repeats))
    what = (
        f"Minimum, median and maximum of {args.repeats} runs after {WARM_UP} to warm up. Memory: peak above the "
        "inputs. Error against float64: the largest difference (entropy and log-probs in nats, softmax in "
        "probability, temperature as T'/T); losses: relative, of the value and of the gradient's norm; layers: "
        "relative, of the norm of hidden states. "
        f"torch {torch.__version__}, transformers {transformers.__version__}."
    )
    if args.output:
        write_report("gpu_kernels", what, HEADER, rows)
    else:
        print(report_text("gpu_kernels", what, HEADER, rows))


if __name__ == "__main__":
    main()
