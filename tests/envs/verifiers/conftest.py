"""The fake engine, a model directory and an arena, as the tests of the env room have them."""

from tests.env.conftest import arena, engine, model_dir, spec

__all__ = ["arena", "engine", "model_dir", "spec"]
