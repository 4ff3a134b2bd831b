"""A model's numbers of parameters and its KV cache against formulas and what is published."""

import pytest

from tests.trainer.checks.model.models import PUBLISHED, TINY, decoder, model
from verl.trainer.checks.model.shape import model_shape


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_are_those_of_llamas_formula(tied):
    attention = 64 * 64 + 2 * 64 * (2 * 16) + 64 * 64  # queries, keys and values of 2 heads of 16, output
    layer = attention + 3 * 64 * 160 + 2 * 64  # the MLP's three matrices, two norms
    assert model_shape(decoder(*TINY, tied)).parameters == 3 * layer + 64 + 500 * 64 * (1 if tied else 2)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name):
    assert model_shape(model(name)).parameters == pytest.approx(PUBLISHED[name][0], rel=0.005)


def test_a_tokens_keys_and_values():
    """Qwen2.5-7B: 28 layers x 4 heads x 128 x (key, value) x 2 bytes; eight GPUs share four heads by copying them."""
    shape = model_shape(model("Qwen2.5-7B"))
    assert [shape.kv_bytes_per_token(gpus) for gpus in (1, 2, 4, 8)] == [57_344, 28_672, 14_336, 14_336]
