"""What a token takes in the arena, of the shapes that model families have."""

import pytest

from shmrl.config import RunTree
from shmrl.payload.budget import ModelShape, bytes_per_token, read_shape


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        ({"num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48}, (48, 128, 8)),
        ({"num_local_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24}, (24, 32, 4)),
        (
            {"n_routed_experts": 256, "num_experts_per_tok": 8, "num_hidden_layers": 61, "first_k_dense_replace": 3},
            (58, 256, 8),
        ),
        (
            {"num_experts": 60, "num_experts_per_tok": 4, "num_hidden_layers": 24, "decoder_sparse_step": 2},
            (12, 60, 4),
        ),
        ({"num_hidden_layers": 24}, (0, 0, 0)),
    ],
)
def test_shapes_of_model_families(config, shape):
    common = {"vocab_size": 1000, "max_position_embeddings": 4096}
    assert read_shape({**config, **common}) == ModelShape(*shape, 1000, 4096)
    assert read_shape({"text_config": {**config, **common}}) == ModelShape(*shape, 1000, 4096)


@pytest.mark.parametrize(("experts", "nbytes"), [(128, 384), (256, 384), (512, 768), (1 << 17, 1536)])
def test_ids_take_the_narrowest_integer(experts, nbytes):
    source = {"name": "a", "env": {"id": "reverse-text"}, "sampling": {"top_p": 0.9, "top_k": 20}}
    tree = RunTree.model_validate(
        {
            "model": {"tiny": {}},
            "orchestrator": {"batch_size": 8, "train": {"source": [source]}},
            "trainer": {"head": 4},
        }
    )
    found = bytes_per_token(tree, ModelShape(48, experts, 8, 1000, 4096))
    assert found == {"tokens, log-probabilities, text": 12.2, "routing": nbytes, "head": 32, "mask": 84}
