"""What a token takes in the arena."""

import pytest

from shmrl.config import RunTree
from shmrl.config.budget import bytes_per_token
from shmrl.config.shape import ModelShape


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
    found = bytes_per_token(tree, ModelShape(48, tuple(range(48)), experts, 8, 1000, 4096))
    assert found == {"tokens, log-probabilities, text": 12.2, "routing": nbytes, "head": 32, "mask": 84}
