"""A tree that reads rewards or learns is refused where rewards come too late, or nothing learns."""

import pytest

from tests.configs import composed
from verl.trainer.checks.parts import check_parts


@pytest.mark.parametrize(
    ("tree", "overrides", "message"),
    [
        ("deep_grpo", ["trainer.v1.trainer_mode=watched_sync"], "trainer_mode=watched_sync: the trainer learns"),
        ("deep_grpo", ["reward.reward_model.enable=true"], "enable_resource_pool=false: tree=deep_grpo needs rewards"),
        ("branpo", ["reward.reward_model.enable=true"], "enable_resource_pool=false: tree=branpo needs rewards"),
        ("branpo", ["trainer.v1.trainer_mode=watched_sync"], None),
        ("branpo", ["reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true"], None),
        ("tree_grpo", ["trainer.v1.trainer_mode=watched_sync", "reward.reward_model.enable=true"], None),
    ],
)
def test_what_a_tree_needs(tree, overrides, message):
    config = composed("explore", "hardware=cpu", f"tree={tree}", *overrides)
    if message is None:
        check_parts(config)
        return
    with pytest.raises(ValueError, match=message):
        check_parts(config)
