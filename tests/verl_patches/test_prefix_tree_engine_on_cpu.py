"""Upstream's engine code that the prefix-tree engine overrides or calls; tests/workers/engine has what it computes."""

from tests.verl_patches.upstream import check_unchanged

PATCH, MODULE = "verl_patches/prefix_tree_engine.py", "verl.workers.engine.fsdp.transformer_impl"


def test_forward_backward_batch_has_not_changed():
    check_unchanged(PATCH, MODULE, "FSDPEngine.forward_backward_batch", "097af0bab5e6")


def test_prepare_micro_batches_has_not_changed():
    check_unchanged(PATCH, "verl.workers.engine.utils", "prepare_micro_batches", "786b212905c6")


def test_build_module_has_not_changed():
    check_unchanged(PATCH, MODULE, "FSDPEngine._build_module", "d8c47c162dc9")


def test_prepare_model_inputs_has_not_changed():
    check_unchanged(PATCH, MODULE, "FSDPEngineWithLMHead.prepare_model_inputs", "ef54213906ac")


def test_prepare_model_outputs_has_not_changed():
    check_unchanged(PATCH, MODULE, "FSDPEngineWithLMHead.prepare_model_outputs", "06c245b398a0")
