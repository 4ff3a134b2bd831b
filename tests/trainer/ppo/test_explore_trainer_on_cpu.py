"""The trees file holds what the viewer needs, for trees of a tree rollout and of plain samples."""

import json

from recipe.common.tiny_model import make_tokenizer
from verl.trainer.ppo.v1.tree_reports import tree_record
from verl.workers.rollout.trajectory_tree import tree_of_rows


def test_a_record_names_the_text_of_every_token():
    tokenizer = make_tokenizer()
    prompt, first, second = (tokenizer(text).input_ids for text in ("1 2 = 3", "1 + 2", "2 - 1"))
    tree = tree_of_rows(prompt, [first, second, first], [[-0.5] * len(row) for row in (first, second, first)])
    tree.segments[0].info.notes["suppressed"] = [{"offset": 0, "token": second[0] + 1, "prob": 0.2}]
    record = json.loads(json.dumps(tree_record(tree, 3, "a", [1.0, 0.0, 1.0], "tree", tokenizer)))
    assert record["prompt"] == "1 2 = 3" and record["rewards"] == [1.0, 0.0, 1.0] and record["step"] == 3
    assert set(record["vocabulary"]) == {str(token) for token in {*first, *second, second[0] + 1}}
    texts = ["".join(record["vocabulary"][str(token)] for token in tokens) for tokens in tree.trajectories()]
    assert texts == ["1 + 2", "2 - 1", "1 + 2"]
