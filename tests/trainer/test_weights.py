"""Published weights: what anyone loads equals what is trained, files appear whole, old versions go."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from shmrl.errors import RunError
from shmrl.trainer import weights
from shmrl.trainer.models import load_model
from shmrl.trainer.parallel import full_state
from tests.trainer.families import FAMILIES, build


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_published_loads_equal(family, tmp_path):
    model = build(family)
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "old.safetensors").write_text("not copied")
    state = full_state(model)
    for name in list(state)[:3]:
        state[name] = state[name] + 1.0  # what counts is the state given, not the module's
    weights.write_model(model, state, source, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[name], state[name]) for name in state)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(tmp_path / "out"))
    assert not (tmp_path / "out" / "old.safetensors").exists()


def test_versions_have_the_dtype_of_the_model_they_started_from(make_tree, model_dir, tmp_path):
    source = tmp_path / "bfloat16"
    AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).save_pretrained(source)
    lm = build("deepseek_v3")
    state = full_state(lm)
    published = weights.publish(make_tree(), 1, lm, state, source)
    stored = load_file(published / "model.safetensors")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert {name: t.dtype for name, t in stored.items() if t.dtype != torch.bfloat16} == {bias: torch.float32}
    assert json.loads((published / "config.json").read_text())["dtype"] == "bfloat16"
    assert AutoModelForCausalLM.from_pretrained(published).dtype == torch.bfloat16
    assert state["lm_head.weight"].dtype == torch.float32
    weights.write_model(lm, state, source, tmp_path / "checkpoint")
    assert {t.dtype for t in load_file(tmp_path / "checkpoint" / "model.safetensors").values()} == {torch.float32}


def test_a_directory_that_is_there_gets_new_weights_in_one_move(make_tree, model_dir):
    tree = make_tree()
    lm = load_model(model_dir)
    target = weights.publish(tree, 0, lm, full_state(lm), model_dir)
    (target / "note.txt").write_text("stays")
    with open(target / "model.safetensors", "rb") as reader:
        size = os.path.getsize(target / "model.safetensors")
        zeros = {name: torch.zeros_like(tensor) for name, tensor in full_state(lm).items()}
        assert weights.publish(tree, 0, lm, zeros, model_dir) == target
        assert len(reader.read()) == size  # a reader of the old file still has all of it
    assert (target / "note.txt").read_text() == "stays"
    assert not any(tensor.any() for tensor in load_model(target).state_dict().values())
    assert [path.name for path in target.parent.iterdir()] == ["step_0"]


def test_a_failed_publication_leaves_nothing(make_tree, model_dir):
    tree = make_tree()
    lm = load_model(model_dir)
    with pytest.raises(RunError, match=r"weights/step_1 cannot be written, .* FileNotFoundError"):
        weights.publish(tree, 1, lm, full_state(lm), model_dir / "missing")
    assert list((tree.run.output_dir / "weights").iterdir()) == []


def test_prune_keeps_the_newest_the_checkpointed_and_version_zero(make_tree):
    tree = make_tree(keep_weights=2)
    for step in range(8):
        tree.weights_dir(step).mkdir(parents=True)
    (tree.run.output_dir / "checkpoints" / "step_3").mkdir(parents=True)
    weights.prune(tree, 6)
    assert weights.steps_in(tree.run.output_dir / "weights") == [0, 3, 5, 6, 7]
