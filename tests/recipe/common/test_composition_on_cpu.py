"""Every tree with every sampler, credit and loss: a real update of a real tiny model, without Ray.

Each tree is grown once for each sampler. Rewards differ among the trajectories of a group, so that every combination
has something to learn: its gradient must be finite and not zero. tests/e2e/test_explore_countdown_on_cpu.py runs one of
them on the real stack.
"""

import asyncio
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo.core_algos import get_adv_estimator_fn, get_policy_loss_fn

from recipe.common.tiny_model import TinyModelConfig, make_model, make_tokenizer
from tests.workers.rollout.trees.arpo.toy_agent import ToyPolicy, library
from verl.trainer.ppo.token_fields import FIELDS
from verl.trainer.ppo.tree_credit import ESTIMATORS, SEGMENT_IDS
from verl.trainer.ppo.v1.components import components_of
from verl.workers.config import PolicyLossConfig
from verl.workers.config.explore import ExploreActorConfig
from verl.workers.rollout.group_rollout import VersionRecorder
from verl.workers.rollout.rollout_engine import TransformersEngine
from verl.workers.rollout.tools.protocol import Protocol
from verl.workers.rollout.trajectory_tree import Segment, TrajectoryTree
from verl.workers.rollout.trees.arpo.config import ToolTreeConfig
from verl.workers.rollout.trees.arpo.growth import ToolTree
from verl.workers.rollout.trees.latr.config import KTConfig
from verl.workers.rollout.trees.latr.growth import latr_group

N, PROMPTS = 6, ("1 2 3 = 6", "4 5 6 = 15")
LOSSES = {
    "vanilla": {},
    "hapo": {"adaptive_clip": True, "adaptive_advantage": True},
    "aepo": {"enable_entropy_balanced_clipping": True, "enable_entropy_balanced_advantage": True},
}
TEMPERED = {"temperature_tau": 0.5, "median": 0.0, "std": 1.0, "scale_pos": 1.0, "scale_neg": 1.0}
SAMPLERS = {"plain": {}, "tempered": {"extra_args": {"adaptive_temperature": TEMPERED}}}
TOKENIZER = make_tokenizer()
STOP = [TOKENIZER.eos_token_id]


@pytest.fixture(scope="module")
def model():
    return make_model(TinyModelConfig(hidden_size=32, intermediate_size=64, num_heads=2, num_kv_heads=2), TOKENIZER)


async def plain(engine, prompt_ids, seed) -> TrajectoryTree:
    tree = TrajectoryTree(prompt_ids)
    for i in range(N):
        made = await engine.generate(prompt_ids, max_tokens=10, stop_token_ids=STOP, seed=100 * seed + i)
        tree.leaves.append(tree.add(Segment(None, made.token_ids, made.log_probs)))
    return tree


async def latr(engine, prompt_ids, seed) -> TrajectoryTree:
    config = KTConfig(prob_filter_abs_thres=0.0, prob_filter_rel_thres=1.0, rollout_filter_steps=[3], chunk_size=4)
    config.mix_ratio_schedule = {0: 0.7}
    options = {"max_new_tokens": 10, "eos_token_ids": STOP, "text_of": lambda t: TOKENIZER.decode([t])}
    return await latr_group(engine, prompt_ids, N, config, seed=seed, **options)


async def arpo(engine, prompt_ids, seed) -> TrajectoryTree:
    """Turns and tool calls are a toy policy's: an untrained model writes none. What is trained is the model."""
    tools = library()
    config = ToolTreeConfig(initial_rollouts=3, entropy_tokens=4, entropy_top_k=4, call_limit=2, branch_probability=1.0)
    options = {"room": 200, "stop_token_ids": STOP, "seed": seed, "request_id": "group"}
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    protocol = Protocol(TOKENIZER, list(tools.tools))
    return await ToolTree(ToyPolicy(), tools, protocol, prompt_ids, N, config, sampling=sampling, **options).run()


TREES = {"plain": plain, "latr": latr, "arpo": arpo}


@pytest.fixture(scope="module")
def groups(model):
    """(tree, sampler) -> the trees of all prompts."""

    def grown(tree: str, sampler: str) -> list[TrajectoryTree]:
        prompts = [TOKENIZER.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for text in PROMPTS]
        engines = [VersionRecorder(TransformersEngine(model, TOKENIZER), SAMPLERS[sampler]) for _ in prompts]
        made = zip(engines, prompts, strict=True)
        return [asyncio.run(TREES[tree](engine, prompt, seed)) for seed, (engine, prompt) in enumerate(made)]

    return {(tree, sampler): grown(tree, sampler) for tree in TREES for sampler in SAMPLERS}


def padded(rows: list[list], value: float = 0) -> torch.Tensor:
    width = max(map(len, rows))
    return torch.tensor([[*row, *[value] * (width - len(row))] for row in rows])


def log_probs_and_entropies(model, trees: list[TrajectoryTree]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, T) of the responses under the model, row by row."""
    log_probs, entropies = [], []
    for tree in trees:
        for tokens in tree.trajectories():
            ids = torch.tensor([[*tree.prompt_ids, *tokens]])
            logits = model(ids).logits[0, len(tree.prompt_ids) - 1 : -1]
            log_probs.append(logits.log_softmax(-1).gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1))
            entropies.append(torch.distributions.Categorical(logits=logits).entropy())
    return tuple(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True) for rows in (log_probs, entropies))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("credit", ["grpo", "hapo", *ESTIMATORS])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("tree", TREES)
def test_a_combination_takes_a_step(model, groups, tree, sampler, credit, loss):
    trees = groups[tree, sampler]
    mask = padded([row for one in trees for row in one.response_masks()])
    segment_ids = padded([row for one in trees for row in one.segment_ids()], -1)
    index = np.repeat(PROMPTS, N)
    rewards = torch.zeros(mask.shape)
    rewards[:, 0] = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 0.0] * len(PROMPTS))
    with SEGMENT_IDS.given(segment_ids):
        advantages, _ = get_adv_estimator_fn(credit)(rewards, mask.float(), index=index)

    switches = LOSSES[loss]
    config = {
        "actor_rollout_ref": {"actor": switches, "rollout": {"name": "vllm"}},
        "algorithm": {"adv_estimator": credit},
    }
    with torch.no_grad():
        old, entropies = log_probs_and_entropies(model, trees)
    fields = {}
    for component in components_of(OmegaConf.create(config)):
        if component.entropy_for:
            fields |= component.token_fields(entropies, mask.bool(), {})
    actor = ExploreActorConfig(
        strategy="fsdp2", rollout_n=N, use_dynamic_bsz=True, policy_loss=PolicyLossConfig(loss_mode=loss), **switches
    )
    model.zero_grad()
    new, _ = log_probs_and_entropies(model, trees)
    with ExitStack() as stack:
        for name, values in fields.items():
            stack.enter_context(FIELDS[name].given(values))
        value, _ = get_policy_loss_fn(loss)(old, new, advantages, mask.float(), "token-mean", actor)
    value.backward()
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    assert torch.isfinite(value) and torch.isfinite(gradient).all() and gradient.abs().max() > 1e-6


def test_the_trees_are_what_their_names_say(groups):
    """Plain responses share nothing, the others do; a tempered sampler draws other tokens, a greedy tree stays."""
    for (tree, _), trees in groups.items():
        shared = any(len({row[0] for row in one.segment_ids()}) < N for one in trees)
        assert shared == (tree != "plain"), tree
    assert groups["plain", "plain"][0].trajectories() != groups["plain", "tempered"][0].trajectories()
    assert 0 in padded([row for one in groups["arpo", "plain"] for row in one.response_masks()], 1)
