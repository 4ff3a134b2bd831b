"""Tests of the content of HATO's rows, on a tiny model in process; tests/e2e has the real stack."""

import asyncio
import pickle
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from recipe.common.tiny_model import TinyModelConfig, make_model, make_tokenizer
from recipe.hato.value_model import FEATURES
from tests.configs import composed
from tests.recipe.arpo.toy_agent import TOKENIZER, Library, ToyPolicy
from verl.workers.rollout.engines.local_transformers import TransformersEngine
from verl.workers.rollout.prompt_task import PromptTask
from verl.workers.rollout.trajectory_tree import (
    DROPPED_STEPS,
    SEGMENT_IDS,
    TREE,
    TREE_DATA,
    TREE_METRICS,
    TrajectoryTree,
)
from verl.workers.rollout.tree_rollout import TreeRollout

N = 6
SAMPLING = {"temperature": 0.5, "top_p": 1.0, "top_k": -1}


class Scorer:
    """Upstream's `_compute_score`: right when the response has an even number of tokens."""

    def __init__(self):
        self.asked = []

    async def __call__(self, outputs, kwargs):
        (output,) = outputs
        self.asked.append((tuple(output.response_ids), kwargs))
        output.reward_score = float(len(output.response_ids) % 2 == 0)


@pytest.fixture(scope="module")
def engine():
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    tokenizer = make_tokenizer()
    return TransformersEngine(make_model(TinyModelConfig(**sizes), tokenizer).eval(), tokenizer)


@cache
def config_of(*overrides: str):
    keys = ["hato.exploration.initial_temperature=0.5", "hato.tree.max_step_tokens=3", "hato.tree.max_depth=3"]
    keys += [f"actor_rollout_ref.rollout.{key}" for key in ("seed=1", "prompt_length=8", "response_length=12")]
    keys += ["trainer.tree_freq=2", f"actor_rollout_ref.rollout.n={N}"]
    return composed("explore", "hardware=cpu", "tree=hato", *keys, *overrides)


def rollout_of(engine, *overrides: str, scorer: Scorer | None = None) -> TreeRollout:
    async def initial_tokens(messages, tools=None):
        return TOKENIZER.encode(messages[0]["content"])

    rollout = TreeRollout(
        config_of(*overrides), SimpleNamespace(ct_build_initial_tokens=initial_tokens), engine, TOKENIZER
    )
    rollout.compute_score = scorer
    return rollout


def task_of(step=2, **row) -> PromptTask:
    return PromptTask({"uid": "u", "index": 0, "raw_prompt": [{"role": "user", "content": "1+2"}]} | row, step)


def run(rollout, *args, **options):
    return asyncio.run(rollout.run(task_of(*args, **options), N, dict(SAMPLING)))


TOOLS = [
    "environment=tools",
    "actor_rollout_ref.rollout.response_length=160",
    "actor_rollout_ref.rollout.tools.tool_instances.python=null",
    f"+actor_rollout_ref.rollout.tools.tool_instances.search={{class_path:{Library.__module__}.Library,params:{{}}}}",
    "hato.tree.max_step_tokens=30",
]


@pytest.fixture(scope="module", params=["none", "tools"])
def outputs(request, engine):
    """The rows of a prompt, with its tree."""
    if request.param == "tools":
        asks = [{"role": "user", "content": "assistant\n"}]
        rows = run(rollout_of(ToyPolicy(calls=2), *TOOLS), raw_prompt=asks)
        assert any(0 in row.response_mask for row in rows)
        return rows
    return run(rollout_of(engine))


def test_token_fields_travel_as_tensors_of_the_responses_length(outputs):
    tree = TrajectoryTree.from_json(outputs[0].extra_fields[TREE])
    for output in outputs:
        row, size = output.as_dict(), len(output.response_ids)
        assert (row[SEGMENT_IDS.name].dtype, row[SEGMENT_IDS.name].shape) == (torch.int64, (size,))
        assert (row["draws"].dtype, row["draws"].shape) == (torch.int64, (size,))
        assert (row["local_rewards"].dtype, row["local_rewards"].shape) == (torch.float32, (size,))
        shown = [tree.segments[i].info.shown() for i in row[SEGMENT_IDS.name].tolist()]
        assert row["draws"].tolist() == [each.get("draws", 1) for each in shown]
        assert row["local_rewards"].tolist() == pytest.approx([each["local_rewards"] for each in shown])
        assert 0 <= row["local_rewards"].min() and row["local_rewards"].max() <= 1


def test_the_steps_are_those_of_the_rows_and_travel_with_the_first_one(outputs):
    steps = pickle.loads(outputs[0].extra_fields[TREE_DATA]).estimates
    tree = TrajectoryTree.from_json(outputs[0].extra_fields[TREE])
    in_rows = {i for output in outputs for i in output.token_fields[SEGMENT_IDS.name]}
    assert steps.keys() <= in_rows and len(steps) == outputs[0].extra_fields[TREE_METRICS]["nodes_kept"]
    # every segment belongs to a step: its own, or that of the segment that it follows alone
    children = {i: [j for j in in_rows if tree.segments[j].parent == i] for i in in_rows}
    for i in in_rows - steps.keys():
        assert children[tree.segments[i].parent] == [i]
    for i, step in steps.items():
        assert len(step.features) == len(FEATURES) and step.value == tree.segments[i].info.notes["value"]
    assert "features" not in outputs[0].extra_fields[TREE]
    assert outputs[0].extra_fields[TREE_METRICS]["leaves"] == len(outputs) > 1
    for output in outputs[1:]:
        assert not {TREE, TREE_METRICS, TREE_DATA} & set(output.extra_fields)


def test_a_tree_that_is_not_written_has_its_steps_and_metrics_all_the_same(engine):
    first, *_ = run(rollout_of(engine), step=1)
    assert TREE not in first.extra_fields and {TREE_METRICS, TREE_DATA} <= set(first.extra_fields)


def test_the_reward_loop_scores_steps(engine):
    scorer = Scorer()
    rollout = rollout_of(engine, "hato.local_reward=reward_loop", scorer=scorer)
    outputs = run(rollout, extra_info={"split": "train"})
    asked = {response: kwargs["extra_info"] for response, kwargs in scorer.asked}
    tree = TrajectoryTree.from_json(outputs[0].extra_fields[TREE])
    for leaf, response in zip(tree.leaves, tree.trajectories(), strict=True):
        end = 0
        for segment in (tree.segments[i] for i in tree.path(leaf)):
            begin, end = end, end + len(segment.token_ids)
            about = asked[tuple(response[:end])]
            before, step = about["hato_step"].values()
            # A character that the step completes is the step's.
            assert about["split"] == "train" and before + step == TOKENIZER.decode(response[:end])
            assert TOKENIZER.decode(response[:begin]).rstrip("\ufffd") == before
            assert segment.info.shown()["local_rewards"] == float(end % 2 == 0)
    with pytest.raises(ValueError, match="needs rewards that are computed during the rollout"):
        run(rollout_of(engine, "hato.local_reward=reward_loop"))


DROPPING = ["hato.tree.train_dropped=true", "hato.exploration.pruning_threshold=0.55", "hato.exploration.beta_u=0"]
FILTER = ["+algorithm.filter_groups={enable:true,metric:acc}"]


@pytest.mark.parametrize("filtered", [False, True])
def test_rows_without_an_answer_have_reward_0_and_say_so(engine, filtered):
    rows = []
    for index in range(8):
        rollout = rollout_of(engine, *DROPPING, *(FILTER if filtered else []))
        outputs = run(rollout, index=index)
        tree = TrajectoryTree.from_json(outputs[0].extra_fields[TREE])
        assert len(outputs) <= N and [o.response_ids for o in outputs] == tree.trajectories()
        for output, leaf in zip(outputs, tree.leaves, strict=True):
            assert output.reward_score == (0.0 if tree.is_dropped(leaf) else None)
            of_segments = [
                tree.segments[i].info.shown().get("dropped", 0) for i in output.token_fields[SEGMENT_IDS.name]
            ]
            assert output.token_fields[DROPPED_STEPS.name] == of_segments
            assert any(of_segments) == tree.is_dropped(leaf)
            if tree.is_dropped(leaf):
                assert output.extra_fields["reward_extra_info"] == ({"acc": 0.0} if filtered else {})
                assert output.as_dict()["rm_scores"].tolist() == [0.0] * len(output.response_ids)
        rows += outputs
    assert {output.reward_score for output in rows} == {0.0, None}, "otherwise this tests nothing"


@pytest.mark.parametrize(("overrides", "options"), [(DROPPING[1:], {}), (DROPPING, {"plain": True})])
def test_rows_without_training_of_dropped_steps_and_validation_have_answers_only(engine, overrides, options):
    outputs = asyncio.run(rollout_of(engine, *overrides).run(task_of(), N, dict(SAMPLING), **options))
    assert not any(DROPPED_STEPS.name in output.token_fields for output in outputs)
    assert {output.reward_score for output in outputs} == {None} and (len(outputs) == N or not options)
