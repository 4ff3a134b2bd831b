"""Upstream's code that the CPU platform changes; tests/e2e trains with it."""

from tests.verl_patches.upstream import check_unchanged

PATCH = "verl_patches/platform_cpu.py"


def test_the_process_group_of_torchrun_has_not_changed():
    check_unchanged(PATCH, "verl.utils.distributed", "initialize_global_process_group", "c0dcd8ce78be")


def test_the_process_group_of_ray_has_not_changed():
    check_unchanged(PATCH, "verl.utils.distributed", "initialize_global_process_group_ray", "e9ec517a0089")


def test_the_replay_buffers_poll_has_not_changed():
    check_unchanged(PATCH, "verl.trainer.ppo.v1.replay_buffer", "ReplayBuffer._wait_for_next_poll", "daeb02f4ccba")


def test_the_offload_policy_of_forward_only_models_has_not_changed():
    module = "verl.workers.engine.fsdp.transformer_impl"
    check_unchanged(PATCH, module, "FSDPEngine._build_fsdp_module", "6855699967a0")


def test_receive_weights_has_not_changed():
    module = "verl.workers.rollout.vllm_rollout.bucketed_weight_transfer"
    check_unchanged(PATCH, module, "BucketedWeightReceiver.receive_weights", "7b2aa2da726e")
