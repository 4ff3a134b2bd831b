"""Compares the error of shared tokens' bfloat16 gradients: the prefix tree against independent rows.

    python -m benchmarks.shared_gradients [--device cuda] [--sharers 512]

Needs torch and transformers only. `sharers` sequences begin with the same prompt; the loss is a random sum over the
attention outputs of their own tokens. The error of the gradients of the prompt's keys and values is relative to the
gradients in float64. Each row's gradients are rounded to bfloat16, but their sum over the rows is not. On a CPU the
prompt and the attention are smaller. Prints a table and writes no file.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.report import parser_of, table_lines
from verl.workers.engine.prefix_tree.attention import TrieSegments
from verl.workers.engine.prefix_tree.trie import build_trie


class Shape(NamedTuple):
    """Lengths in tokens of the prompt and of each own part, and the number and size of attention heads."""

    prompt: int
    own: int
    heads: int
    kv_heads: int
    size: int


SMALL, LARGE = Shape(8, 2, 4, 2, 16), Shape(256, 16, 14, 2, 64)


def errors(sharers: int, shape: Shape, device: str) -> dict[str, float]:
    """Return the relative errors of `rows` and `tree` in bfloat16, and of `exact`: the tree's in float64, on CPU. On
    `cuda` the tree's attention is torch's varlen kernel."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 50, shape.prompt)
    own = rng.integers(0, 50, (sharers, shape.own))
    own[:, 0] = 100 + np.arange(sharers)
    trie = build_trie([np.append(prompt, tokens) for tokens in own])
    nodes = torch.from_numpy(np.stack(trie.node_of)).to(device)  # (sharers, prompt + own)
    generator = torch.Generator().manual_seed(0)

    def random(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).bfloat16().double().to(device)

    states = [random(len(trie), heads, shape.size) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    weights = random(sharers, shape.own, shape.heads, shape.size)

    def rows(dtype: torch.dtype, leaves: list[torch.Tensor]) -> torch.Tensor:
        heads_first = (leaf[nodes].to(dtype).transpose(1, 2) for leaf in leaves)
        output = scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True)
        return output.transpose(1, 2)[:, shape.prompt :]

    def tree(dtype: torch.dtype, leaves: list[torch.Tensor]) -> torch.Tensor:
        output = TrieSegments(trie).attend(*(leaf.to(dtype) for leaf in leaves), shape.size**-0.5)
        return output[nodes[:, shape.prompt :]]

    def gradients(attend, dtype: torch.dtype) -> torch.Tensor:
        leaves = [state.clone().requires_grad_() for state in states]
        (attend(dtype, leaves).double() * weights).sum().backward()
        return torch.stack([leaf.grad[nodes[0, : shape.prompt]] for leaf in leaves[1:]])

    exact = gradients(rows, torch.float64)
    ways = {"exact": (tree, torch.float64), "rows": (rows, torch.bfloat16), "tree": (tree, torch.bfloat16)}
    return {name: float((gradients(*way) - exact).norm() / exact.norm()) for name, way in ways.items()}


def main() -> None:
    args = parser_of(__doc__, device="cpu", sharers=512).parse_args()
    relative_errors = errors(args.sharers, SMALL if args.device == "cpu" else LARGE, args.device)
    rows = [[name, f"{error:.2e}", f"{error / relative_errors['rows']:.2f}"] for name, error in relative_errors.items()]
    print(*table_lines(["way", "relative error", "times that of rows"], rows), sep="\n")


if __name__ == "__main__":
    main()
