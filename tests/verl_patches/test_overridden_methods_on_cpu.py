"""Upstream's methods that classes under verl/ override, and whose work they do themselves."""

import pytest

from tests.verl_patches.upstream import check_unchanged

ROLLOUT, TRAINER = "verl/workers/rollout", "verl/trainer/ppo/v1"


@pytest.mark.parametrize(
    ("patch", "method", "digest"),
    [
        (f"{TRAINER}/tree_buffer.py", "replay_buffer:ReplayBuffer.sample", "c996482f947f"),
        (f"{TRAINER}/tree_buffer.py", "replay_buffer:ReplayBuffer._evict_terminal_groups", "c6e75da93b6a"),
        (f"{ROLLOUT}/group_rollout.py", "agent_loop_tq:AgentLoopWorkerTQ._run_prompt", "ba6ad1731dfb"),
    ],
)
def test_the_trainers_method_has_not_changed(patch, method, digest):
    module, _, name = method.partition(":")
    check_unchanged(patch, f"verl.trainer.ppo.v1.{module}", name, digest)


def test_the_servers_generate_has_not_changed():
    module = "verl.workers.rollout.vllm_rollout.vllm_async_server"
    check_unchanged(f"{ROLLOUT}/engines/top_logprobs_server.py", module, "vLLMHttpServer.generate", "ea45828267c4")
