"""Tiny random models of every family whose routers can be replayed, scaled so that routing and logits differ."""

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

_SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_GROUPS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1}


def qwen3_moe(**changes):
    return Qwen3MoeForCausalLM, Qwen3MoeConfig(**_SHAPE, **_EXPERTS, head_dim=16, norm_topk_prob=True, **changes)


def _qwen3_next():
    linear = {
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    }
    shared = {"shared_expert_intermediate_size": 16, "layer_types": ["linear_attention", "full_attention"]}
    return Qwen3NextForCausalLM, Qwen3NextConfig(**_SHAPE, **_EXPERTS, head_dim=16, **linear, **shared)


def _deepseek():
    mla = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    return DeepseekV3ForCausalLM, DeepseekV3Config(
        **_SHAPE, **_GROUPS, **mla, n_shared_experts=1, first_k_dense_replace=1
    )


FAMILIES = {
    "qwen3_moe": qwen3_moe,
    "qwen3_next": _qwen3_next,
    "olmoe": lambda: (OlmoeForCausalLM, OlmoeConfig(**_SHAPE, num_experts=8, num_experts_per_tok=2)),
    "mixtral": lambda: (MixtralForCausalLM, MixtralConfig(**_SHAPE, num_local_experts=8, num_experts_per_tok=2)),
    "gpt_oss": lambda: (
        GptOssForCausalLM,
        GptOssConfig(
            **_SHAPE,
            num_local_experts=8,
            num_experts_per_tok=2,
            head_dim=16,
            layer_types=["sliding_attention", "full_attention"],
            sliding_window=64,
        ),
    ),
    "deepseek_v3": _deepseek,
    "glm4_moe": lambda: (Glm4MoeForCausalLM, Glm4MoeConfig(**_SHAPE, **_GROUPS, head_dim=16, first_k_dense_replace=1)),
}


def build(family: str, *, scale: float = 4.0, seed: int = 0):
    """A random model in eval mode, matrices `scale` times larger than at initialisation."""
    kind, config = FAMILIES[family]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = kind(config).eval()
    scale_weights(model, scale)
    return model


def scale_weights(model, scale: float) -> None:
    """Multiply every matrix but the embeddings, so that routers and logits are far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:
                parameter.mul_(scale)
