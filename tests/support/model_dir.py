"""A model directory without weights: a byte-level tokenizer, a chat template and the shape of a router."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ["<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
EOS, IM_START, IM_END = 258, 259, 260
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model_dir(directory: Path, **config: Any) -> Path:
    """Written into `directory`; config: of the model, beside its defaults."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    shape = {
        "num_hidden_layers": 4,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "eos_token_id": EOS,
        "vocab_size": 264,
        "max_position_embeddings": 1 << 16,
    }
    files = {
        "tokenizer_config.json": {"chat_template": TEMPLATE, "eos_token": "<eos>", "bos_token": {"content": "<bos>"}},
        "generation_config.json": {"eos_token_id": [EOS, IM_END]},
        "config.json": shape | config,
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    return directory
