"""The model that the examples here train."""

import torch
from engine import EXPERTS, LAYERS, TOP_K
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM


def tiny_model():
    """A random Qwen3-MoE of this shape, over bytes."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=261, num_hidden_layers=LAYERS, head_dim=16, **shape, **experts)
    )
