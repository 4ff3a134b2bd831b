"""The explained composition: numbers that can be computed by hand, the page, and what is refused."""

import json
import re

import pytest
import torch

from recipe.common.explain import PROMPT, explain, explained_config, is_right, main, roll_out, toy, training_step
from verl.trainer.ppo.v1.component import components_of


def batch_and_step(*overrides, drift=0.0):
    config = explained_config(overrides)
    components, (model, tokenizer) = components_of(config), toy(False)
    batch = roll_out(config, components, [PROMPT], model, tokenizer, is_right)
    return config, batch, *training_step(config, components, batch, drift)


def test_grpos_weights_are_advantages_over_tokens():
    config, batch, advantages, gradient = batch_and_step("tree=plain", "credit=grpo", "loss=vanilla")
    rewards = batch.rewards.sum(-1)
    assert 0 < rewards.mean() < 1
    expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
    torch.testing.assert_close(advantages, expected.unsqueeze(-1) * batch.mask)
    torch.testing.assert_close(-gradient, advantages / batch.mask.sum())


def test_a_drifted_policy_is_clipped():
    _, batch, advantages, gradient = batch_and_step("tree=plain", "credit=grpo", "loss=vanilla", drift=0.3)
    change = 0.3 * torch.randn(batch.old.shape, generator=torch.Generator().manual_seed(0))
    clipped = ((change.exp() > 1.2) & (advantages > 0)) | ((change.exp() < 0.8) & (advantages < 0))
    counted = batch.mask.bool()
    assert (gradient[counted & clipped] == 0).all() and (gradient[counted & ~clipped] != 0).all()
    assert (counted & clipped).any()


@pytest.mark.parametrize("tree", ["treepo", "latr"])
def test_a_segments_line_sums_its_trajectories(tree):
    overrides = (f"tree={tree}", "credit=tree_gain", "loss=vanilla")
    text, record = explain(explained_config(overrides))
    config, batch, advantages, gradient = batch_and_step(*overrides)
    through = {i: batch.fields["segment_ids"] == i for i in range(len(record["segments"]))}
    shared = max(through, key=lambda i: through[i].any(-1).sum())
    info, at = record["segments"][shared]["info"], through[shared]
    assert at.any(-1).sum() > 1
    assert info["value"] == pytest.approx(batch.rewards.sum(-1)[at.any(-1)].mean().item())
    first = [row.nonzero()[0].item() for row in at if row.any()]
    weight = -1000 * gradient[at.any(-1), first].sum().item()
    assert float(info["weight"].split()[0]) == pytest.approx(weight, abs=0.06)
    assert re.search(rf" {at.any(-1).sum()} +{info['value']:.2f} ", text)


def test_tools_answer_and_the_first_step_tempers_nothing(capsys):
    main(["tree=arpo", "environment=tools"])
    assert "<search>a b</search>" in (out := capsys.readouterr().out) and "(the environment's)" in out
    texts = [explain(explained_config([f"sampler={sampler}"]))[0] for sampler in ("plain", "tempered")]
    assert texts[0] != texts[1]


def test_the_page(tmp_path, capfd):
    main(["tree=hato", "--html", str(tmp_path)])
    (line,) = (tmp_path / "trees/step_000001.jsonl").read_text().splitlines()
    assert len(json.loads(line)["rewards"]) == capfd.readouterr().out.split("trajectories:")[1].split("\n")[0].count(
        " "
    )
    assert (tmp_path / "trees.html").stat().st_size > 1000


@pytest.mark.parametrize(
    ("override", "message"), [("loss=none_such", "loss/none_such"), ("actor_rollout_ref.rollout.n=0", "n")]
)
def test_a_wrong_composition_is_refused(override, message):
    with pytest.raises(SystemExit, match=message):
        main(override.split())
