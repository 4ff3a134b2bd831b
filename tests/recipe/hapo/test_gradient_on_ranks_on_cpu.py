"""One step's gradient of the loss `hapo` is the same on one and on two FSDP2 ranks, whatever the micro-batches.

The ranks are two processes on gloo (about 15 s); h comes from the whole batch, as the trainer computes it.
"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn

from recipe.hapo.loss import compute_policy_loss_hapo
from recipe.hapo.normalized_entropy import ENTROPY_H, compute_entropy_h

ROWS, LENGTH, FEATURES, VOCABULARY = 8, 6, 5, 11


def gradient(rank: int, ranks: int, rows_per_micro_batch: int, shard: bool) -> torch.Tensor:
    """The weight's gradient (VOCABULARY, FEATURES) after one backward pass over the batch, dealt to the ranks."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(ROWS, LENGTH, FEATURES, generator=generator)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    advantages = torch.randn(ROWS, 1, generator=generator) * mask
    torch.manual_seed(1)
    policy = nn.Linear(FEATURES, VOCABULARY)
    with torch.no_grad():
        old = policy(features).log_softmax(-1)
        entropy = -(old.exp() * old).sum(-1)
        old = old.gather(-1, tokens[..., None])[..., 0]
        policy.weight.add_(0.3 * torch.randn(VOCABULARY, FEATURES, generator=generator))  # ratios leave 1
    h, _ = compute_entropy_h(entropy, mask)
    if shard:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(policy, mesh=init_device_mesh("cpu", (ranks,)))
    info = {"dp_size": ranks, "batch_num_tokens": mask.sum().item(), "global_batch_size": ROWS}
    config = SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, clip_ratio_c=10.0, clip_alpha=1.0)
    vars(config).update(adaptive_clip=True, adaptive_advantage=True, adv_beta=1.0, global_batch_info=info)
    for rows in torch.arange(rank, ROWS, ranks).split(rows_per_micro_batch):
        new = policy(features[rows]).log_softmax(-1).gather(-1, tokens[rows][..., None])[..., 0]
        with ENTROPY_H.bound(h[rows]):
            loss, _ = compute_policy_loss_hapo(old[rows], new, advantages[rows], mask[rows], "token-mean", config)
        loss.backward()
    return policy.weight.grad.full_tensor() if shard else policy.weight.grad


def on_a_rank(folder: str) -> None:
    dist.init_process_group("gloo")
    for rows_per_micro_batch in (1, 4):
        actual = gradient(dist.get_rank(), dist.get_world_size(), rows_per_micro_batch, shard=True)
        if dist.get_rank() == 0:
            torch.save(actual, f"{folder}/{rows_per_micro_batch}.pt")
    dist.destroy_process_group()


def test_the_gradient_does_not_depend_on_the_ranks(tmp_path):
    from tests.forked import torchrun  # the ranks have no tests

    alone = gradient(0, 1, ROWS, shard=False)
    assert alone.abs().max() > 1e-3
    done = torchrun(2, __file__, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for rows_per_micro_batch in (1, 4):
        actual = torch.load(tmp_path / f"{rows_per_micro_batch}.pt")
        torch.testing.assert_close(actual, alone, rtol=1e-5, atol=1e-7)


if __name__ == "__main__":
    on_a_rank(sys.argv[1])
