"""Which layers of a model have a router: one reading for the budget, the env workers and the engines' columns."""

import pytest

from shmrl.config.shape import ModelShape, moe_layers, read_shape

COMMON = {"vocab_size": 1000, "max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("config", "layers", "shape"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}, range(48), (128, 8)),
        ({"num_local_experts": 32, "experts_per_token": 4, "num_hidden_layers": 24}, range(24), (32, 4)),
        ({"n_routed_experts": 256, "num_hidden_layers": 61, "first_k_dense_replace": 3}, range(3, 61), (256, 1)),
        ({"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24}, range(24), (60, 4)),
        ({"num_hidden_layers": 24}, (), (0, 0)),
    ],
)
def test_shapes_of_model_families(config, layers, shape):
    expected = ModelShape(config["num_hidden_layers"], tuple(layers), *shape, 1000, 4096)
    assert read_shape({**config, **COMMON}) == expected
    assert read_shape({"text_config": {**config, **COMMON}}) == expected


@pytest.mark.parametrize(
    ("rule", "layers"),
    [
        ({}, (0, 1, 2, 3, 4, 5)),
        ({"decoder_sparse_step": 2}, (1, 3, 5)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (1, 5)),
        ({"first_k_dense_replace": 1, "moe_layer_freq": 2}, (2, 4)),
        ({"moe_layer_freq": [0, 1, 1, 0, 1, 1]}, (1, 2, 4, 5)),
        ({"mlp_layer_types": ["dense", *["sparse"] * 4, "dense"]}, (1, 2, 3, 4)),
    ],
)
def test_layers_with_a_router(rule, layers):
    assert moe_layers({"num_hidden_layers": 6, **rule}) == layers
