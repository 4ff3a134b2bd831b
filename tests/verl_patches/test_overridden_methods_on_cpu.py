"""Upstream's methods that classes under verl/ override, and whose work they do themselves."""

from tests.verl_patches.upstream import check_unchanged


def test_the_replay_buffers_sample_has_not_changed():
    patch, module = "verl/trainer/ppo/v1/tree_buffer.py", "verl.trainer.ppo.v1.replay_buffer"
    check_unchanged(patch, module, "ReplayBuffer.sample", "c996482f947f")


def test_the_replay_buffers_eviction_has_not_changed():
    patch, module = "verl/trainer/ppo/v1/tree_buffer.py", "verl.trainer.ppo.v1.replay_buffer"
    check_unchanged(patch, module, "ReplayBuffer._evict_terminal_groups", "c6e75da93b6a")


def test_the_agent_loop_workers_prompt_has_not_changed():
    patch, module = "verl/workers/rollout/group_rollout.py", "verl.trainer.ppo.v1.agent_loop_tq"
    check_unchanged(patch, module, "AgentLoopWorkerTQ._run_prompt", "ba6ad1731dfb")


def test_the_servers_generate_has_not_changed():
    patch = "verl/workers/rollout/engines/top_logprobs_server.py"
    module = "verl.workers.rollout.vllm_rollout.vllm_async_server"
    check_unchanged(patch, module, "vLLMHttpServer.generate", "ea45828267c4")
