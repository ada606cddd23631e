"""A causal language model behind two calls, prefill and decode, that also say which experts every token was routed to.

Loads any local checkpoint that transformers' AutoModelForCausalLM loads and whose layers all use full attention. New
weights are read and checked beside the old ones, then copied in place. Engine thread only.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from shmrl.errors import EngineError
from shmrl.inference.embedded.cache import SlotCache

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Model:
    """The served model with its KV cache.

    Attributes:
        num_layers, top_k, num_experts: of the routing rows; top_k is 0 for a dense model.
        vocab: width of the logits. max_positions: the longest sequence the checkpoint allows.

    Raises EngineError when `path` holds no model that can be served.
    """

    def __init__(self, path: str | Path, *, dtype: str = "float32", device: str = "cpu") -> None:
        transformers_logging.disable_progress_bar()
        self.path, self.device = Path(path), torch.device(device)
        self._dtype = DTYPES[dtype]
        self.net: Any = self._read(self.path).to(self.device)
        self.config = self.net.config
        text = self.config.get_text_config()
        self.cache = SlotCache(self.net)
        self.num_layers: int = text.num_hidden_layers
        self.vocab: int = text.vocab_size
        self.max_positions: int = text.max_position_embeddings
        self._routers = _Routers(self.net, self.num_layers)
        self._ends: torch.Tensor  # column of each row's last token in the forward pass in progress
        self.net.get_output_embeddings().register_forward_pre_hook(self._keep_ends)
        self.top_k, self.num_experts = self._probe()

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every end-of-sequence id of the generation config."""
        eos = self.net.generation_config.eos_token_id
        return frozenset([eos] if isinstance(eos, int) else eos or [])

    @torch.inference_mode()
    def prefill(self, prompts: list[list[int]], slot: int) -> tuple[torch.Tensor, np.ndarray | None]:
        """Feed whole prompts into slots [slot, slot + B). -> (float32 logits [B, V] of the last tokens, routing).

        Routing: [B, W, L, K] with W the longest prompt, rows past a prompt's end are padding; None for a dense model.
        """
        width = max(map(len, prompts))
        tokens = torch.tensor([p + [0] * (width - len(p)) for p in prompts], device=self.device)
        positions = torch.arange(width, device=self.device)[None].expand(len(prompts), -1)
        self.cache.begin_prefill(slot, slot + len(prompts), width)
        self._ends = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device)
        return self._forward(tokens, positions)

    @torch.inference_mode()
    def decode(self, tokens: list[int], positions: list[int], slot: int) -> tuple[torch.Tensor, np.ndarray | None]:
        """Feed one token at its position to each slot of [slot, slot + B). -> (logits [B, V], routing [B, 1, L, K])."""
        at = torch.tensor(positions, device=self.device)
        columns = max(positions) + 1
        self.cache.begin_decode(slot, slot + len(tokens), at, columns)
        mask = torch.arange(columns, device=self.device)[None] <= at[:, None]
        self._ends = torch.zeros_like(at)
        fed = torch.tensor(tokens, device=self.device)[:, None]
        return self._forward(fed, at[:, None], attention_mask=mask[:, None, None])

    def _forward(self, tokens: torch.Tensor, positions: torch.Tensor, **kwargs: Any) -> tuple[Any, np.ndarray | None]:
        self._routers.begin()
        out = self.net(input_ids=tokens, position_ids=positions, cache=self.cache, use_cache=True, **kwargs)
        return out.logits[:, 0].float(), self._routers.rows(*tokens.shape)

    def _keep_ends(self, head: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Before the output projection: each row's last token only, not [B, W, V] logits of whole prompts."""
        hidden, *rest = args
        return hidden[torch.arange(len(self._ends), device=self.device), self._ends][:, None], *rest

    def _probe(self) -> tuple[int, int]:
        """(top_k, experts) as the routers themselves choose; a router that cannot be captured is an error now."""
        _, routing = self.prefill([[0, 1]], 0)
        if routing is None:
            return 0, 0
        return routing.shape[-1], self._routers.num_experts

    # ------------------------------------------------------------------------------------------------------- weights

    def _read(self, path: Path) -> PreTrainedModel:
        if not (path / "config.json").is_file():
            raise EngineError(f"{path} is no model directory: it has no config.json")
        try:
            net, found = AutoModelForCausalLM.from_pretrained(
                path, dtype=self._dtype, attn_implementation="sdpa", local_files_only=True, output_loading_info=True
            )
        except Exception as error:
            raise EngineError(f"cannot load the model in {path}: {type(error).__name__}: {error}") from error
        wrong = {what: sorted(map(str, found[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        if any(wrong.values()):
            shown = "; ".join(f"{len(names)} {what}: {', '.join(names[:3])}" for what, names in wrong.items() if names)
            raise EngineError(f"the weights in {path} do not fit {type(net).__name__}: {shown}")
        return net.eval()

    def load_weights(self, path: str | Path) -> None:
        """Copy another checkpoint of the same model over the served weights, in place, once all of it is read and fits.

        EngineError names what does not; nothing has changed then. (Reading sets torch's default dtype for the whole
        process while it lasts, so it must not run beside a step.)
        """
        new: dict[str, torch.Tensor] = self._read(Path(path)).state_dict()
        old = self.net.state_dict()
        problems = [f"{name} is not there" for name in old.keys() - new.keys()]
        problems += [f"{name} is not in the served model" for name in new.keys() - old.keys()]
        for name in old.keys() & new.keys():
            if old[name].shape != new[name].shape:
                problems.append(f"{name} has shape {tuple(new[name].shape)}, served is {tuple(old[name].shape)}")
        if problems:
            raise EngineError(f"{path} is not a checkpoint of the served model: {'; '.join(sorted(problems)[:3])}")
        for name, tensor in old.items():
            tensor.copy_(new[name])


class _Routers:
    """Forward hooks on the routers of a mixture-of-experts model, which all return (logits, weights, expert ids)."""

    def __init__(self, net: nn.Module, num_layers: int) -> None:
        self.num_experts = 0
        self._num_layers = num_layers
        self._chosen: dict[int, torch.Tensor] = {}
        for name, module in net.named_modules():
            where = re.search(r"\blayers\.(\d+)\.", name)
            if where and type(module).__name__.lower().endswith("router"):
                module.register_forward_hook(self._hook(int(where[1]), name))

    def _hook(self, layer: int, name: str) -> Any:
        def capture(module: nn.Module, args: Any, output: Any) -> None:
            triple = isinstance(output, tuple) and len(output) == 3
            if not triple or output[2].is_floating_point() or output[0].shape[0] != output[2].shape[0]:
                raise EngineError(f"{name} ({type(module).__name__}) does not return (logits, weights, expert ids)")
            self.num_experts = output[0].shape[-1]
            self._chosen[layer] = output[2]

        return capture

    def begin(self) -> None:
        self._chosen.clear()

    def rows(self, batch: int, width: int) -> np.ndarray | None:
        """[batch, width, L, K] of what was chosen since `begin`; None when nothing was. Narrow: uint8 or uint16.

        Layers without a router hold 0 .. K-1: valid distinct ids which nobody may read, as in vLLM's form.
        """
        if not self._chosen:
            return None
        some = next(iter(self._chosen.values()))
        dense = torch.arange(some.shape[-1], device=some.device).expand_as(some)
        stacked = torch.stack([self._chosen.get(layer, dense) for layer in range(self._num_layers)], dim=1)
        narrow = np.uint8 if self.num_experts <= 256 else np.uint16
        return stacked.cpu().numpy().astype(narrow).reshape(batch, width, self._num_layers, -1)
