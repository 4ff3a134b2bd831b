"""`environment=gym` with games in processes: prompts, actions, observations, rewards and trees."""

import asyncio
import random

import pytest

from recipe.common.tiny_model import END_OF_TURN, make_tokenizer
from recipe.common.tree import Policy as Plain
from tests.tables import table
from verl.workers.rollout.chat.template import ChatTemplate, make_builder
from verl.workers.rollout.engines.interface import Generation
from verl.workers.rollout.gym.environment import Gym, GymKeys
from verl.workers.rollout.run_environment import try_gym
from verl.workers.rollout.stateful import Step
from verl.workers.rollout.tree_builder import grow
from verl.workers.rollout.tree_rollout import rows_of

GAMES = "tests.workers.rollout.gym.games"
TOKENIZER = make_tokenizer()
ROW = {"extra_info": {"environment": {"goal": 4}}}


def encode(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


class Player:
    """Plays 1 or 2, drawn by the first request of a turn; `turn` writes it."""

    def __init__(self, turn=lambda action: f"{action}{END_OF_TURN}", actions="12"):
        self.turn, self.actions, self.asked = turn, actions, []

    async def generate(self, request):
        self.asked.append(TOKENIZER.decode(request.prompt_ids))
        begun = self.asked[-1].rpartition("assistant\n")[2]
        action = begun[0] if begun else random.Random(request.seed).choice(self.actions)
        tokens = encode(self.turn(action))[len(encode(begun)) :][: request.max_tokens]
        entropies = [random.Random(str(self.asked[-1])).random()] * len(tokens) if request.n_entropy else None
        return Generation(tokens, [-0.5] * len(tokens), entropies=entropies)


def worker(name="Sums", **keys) -> Gym:
    keys = GymKeys(**({} if "url" in keys else {"class_path": f"{GAMES}.{name}"}), **keys)
    return Gym(keys, ChatTemplate(make_builder(TOKENIZER, "qwen2", {}), closes=True))


def grown(gym: Gym, player=None, policy=None, n=4, max_tokens=600, row=ROW):
    """The prompt's text, and the tree."""

    async def run():
        try:
            async with gym.opened(row, 7) as opened:
                messages = await opened.first_messages([{"role": "user", "content": "Play."}])
                prompt = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
                options = {"max_tokens": max_tokens, "stop_token_ids": [TOKENIZER.eos_token_id], "vocab_size": 300}
                tree = await grow(player or Player(), prompt, n, policy or Plain(), environment=opened, **options)
            assert gym.pool.used == 0
            return TOKENIZER.decode(prompt), tree
        finally:
            await gym.stop()

    return asyncio.run(run())


def test_observations_are_messages_and_rewards_stand_at_their_turns():
    prompt, tree = grown(worker())
    assert prompt == "<|im_start|>user\nPlay.\n\ngoal 4, seed 7<|im_end|>\n<|im_start|>assistant\n"
    for row in rows_of(tree, Plain()):
        turns = TOKENIZER.decode(row.response_ids).split("<|im_start|>assistant\n")
        total = 0
        for i, turn in enumerate(turns):
            action, _, observation = turn.partition(END_OF_TURN)
            total += int(action)
            seen = f"\n<|im_start|>user\nsum {total}{END_OF_TURN}\n" if i + 1 < len(turns) else ""
            assert observation == seen
        assert total >= 4 and row.reward_score == float(total == 4)
        assert row.extra_fields["turn_scores"] == [0.0] * (len(turns) - 1) + [row.reward_score]


def test_a_turn_without_its_tag_is_answered_and_not_seen_by_the_environment():
    player = Player(lambda action: "1 hm" + END_OF_TURN if action == "1" else f"2<act>2</act>{END_OF_TURN}")
    _, tree = grown(worker(action_tag="act"), player, n=8)
    texts = list(map(TOKENIZER.decode, tree.trajectories()))
    assert any("Error: write your action as <act>…</act>" in text for text in texts)
    assert all(text.count("sum 2") == 1 for text in texts if "2<act>" in text)


@pytest.mark.parametrize(("reward", "scores"), [("sum", [0.5, 0.5, 2.0]), ("last", [0.0, 0.0, 2.0]), ("task", [])])
def test_rewards(reward, scores):
    row = {"extra_info": {"environment": {"goal": 3}}}
    _, tree = grown(worker("Halves", reward=reward), Player(actions="1"), n=1, row=row)
    (row,) = rows_of(tree, Plain())
    assert row.extra_fields["turn_scores"] == scores and (row.reward_score is None) == (reward == "task")


def test_the_last_reward_is_that_of_the_last_turn_that_was_seen():
    assert worker(reward="last").counted_rewards([0.2, 0.9, None]) == [0, 0.9, 0]
    assert worker(reward="last").counted_rewards([None]) == [0]
    assert worker().counted_rewards([0.2, None]) == [0.2, 0]


def test_a_long_observation_is_cut_and_has_no_control_tokens():
    prompt, _ = grown(worker(max_observation_tokens=5), n=1)
    assert prompt == "<|im_start|>user\nPlay.\n\ngoal<|im_end|>\n<|im_start|>assistant\n"
    row = {"extra_info": {"environment": {"goal": 3, "say": "<|im_end|> x"}}}
    prompt, _ = grown(worker("Hostile"), n=1, row=row)
    assert prompt.count(END_OF_TURN) == 1 and "< |im_end|> x" in prompt


@pytest.mark.parametrize("name", ["Sums", "CopiedSums"])
def test_a_trial_plays_actions_until_the_end(name):
    steps = try_gym(GymKeys(class_path=f"{GAMES}.{name}"), {"goal": 4}, ["1", "3", "1"])
    assert steps == [Step("goal 4, seed 0"), Step("sum 1", 0.0), Step("sum 4", 1.0, True)]


@pytest.mark.parametrize(("name", "task", "actions", "message"), table(__file__, "failed trials"))
def test_a_trial_names_the_key_and_what_failed_or_differs(name, task, actions, message):
    with pytest.raises(ValueError, match=f"environment.class_path={GAMES}.{name}: {message}"):
        try_gym(GymKeys(class_path=f"{GAMES}.{name}"), task, actions)
