"""Makes a small Qwen3-MoE model directory on the spot: random weights, a byte-level tokenizer, a chat template.

The launcher runs this as a short child (`python -m shmrl.inference.embedded.tiny RESOLVED.toml`) before anything
starts; tests call `write_tiny`. transformers, vLLM and the embedded engine all load the result.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

from shmrl.config import TinyModel, load_run
from shmrl.errors import ConfigError

SPECIALS = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny(shape: TinyModel, path: str | Path, seed: int) -> Path:
    """Write a float32 model of this shape to `path`, unless a model is there; the directory appears at once, complete.

    Raises ConfigError where `path` holds a tiny model of another shape or seed.

    Example: write_tiny(TinyModel(layers=2, hidden=32), "/tmp/run/weights/step_0", seed=0)
    """
    path = Path(path)
    made_of = {"shape": shape.model_dump(), "seed": seed}
    if (path / "config.json").exists():
        _check_same(path, made_of)
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        _write(shape, work, seed)
        (work / "tiny.json").write_text(json.dumps(made_of, indent=1) + "\n")
        work.chmod(0o755)
        os.rename(work, path)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return path


def _check_same(path: Path, made_of: dict[str, Any]) -> None:
    """A directory without the note was published by a trainer: it is a model, whatever it was made of."""
    note = path / "tiny.json"
    if note.exists() and (found := json.loads(note.read_text())) != made_of:
        raise ConfigError(
            f"{path} holds a model made of {found}, asked for {made_of}: remove it or use another directory"
        )


def _write(shape: TinyModel, path: Path, seed: int) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(path)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = Qwen3MoeConfig(
        num_hidden_layers=shape.layers,
        hidden_size=shape.hidden,
        intermediate_size=2 * shape.hidden,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
        moe_intermediate_size=shape.moe_intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.initializer_range,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        **special,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**{**special, "eos_token_id": [special["eos_token_id"], end]})
    model.save_pretrained(path)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One id per byte (0-255), then the specials; no merges, so every text round-trips and its length is its bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def main(argv: list[str]) -> int:
    """`python -m shmrl.inference.embedded.tiny RESOLVED.toml`: writes <run.output_dir>/weights/step_0."""
    if len(argv) != 1:
        print("usage: python -m shmrl.inference.embedded.tiny RESOLVED.toml", file=sys.stderr)
        return 2
    try:
        tree = load_run([Path(argv[0])])
        disable_progress_bar()
        if tree.model.tiny is None:
            raise ConfigError(f"{argv[0]}: there is no [model.tiny] to write")
        write_tiny(tree.model.tiny, Path(tree.run.output_dir) / "weights" / "step_0", tree.run.seed)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
