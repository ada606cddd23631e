"""The policy as one module: body, then the chunked head at the loss positions, in a single forward.

One root forward because FSDP gathers the head's weight only inside it. Built by `models.load_policy`, wrapped by
`parallel`, called by `step` in a trainer rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from shmrl.trainer.context import ContextParallel
from shmrl.trainer.inputs import ModelInputs
from shmrl.trainer.logprobs import TokenLogprobs, token_logprobs
from shmrl.trainer.replay import RouterReplay


class Policy(nn.Module):
    """A causal language model that answers log-probabilities of sampled tokens, never logits.

    Attributes:
        lm: the transformers model. replay: its router hooks, or None.
        context: its context-parallel group, or None.
        packed: its attention keeps packed sequences apart (flash attention); otherwise it is fed one row per sequence.
    """

    def __init__(
        self,
        lm: Any,
        *,
        replay: RouterReplay | None = None,
        context: ContextParallel | None = None,
        chunk: int = 256,
        packed: bool = False,
    ) -> None:
        super().__init__()
        self.lm = lm
        self.replay, self.context, self.packed, self._chunk = replay, context, packed, chunk

    @contextmanager
    def prepared(self, x: ModelInputs) -> Iterator[None]:
        """Around forward and backward of `x`: what routers and attention layers take from it besides their inputs."""
        with ExitStack() as stack:
            if self.replay is not None:
                stack.enter_context(self.replay.routes(x.routes))
            if self.context is not None:
                stack.enter_context(self.context.share(x.visible))
            yield

    def forward(self, x: ModelInputs) -> TokenLogprobs:
        """Log-probabilities and entropy at the S loss positions; S may be 0 (gradients are then zeros)."""
        body = self.lm.get_decoder()
        hidden = body(input_ids=x.tokens, position_ids=x.position_ids, use_cache=False).last_hidden_state
        picked = hidden.flatten(0, 1)[x.picks]
        weight = self.lm.get_output_embeddings().weight
        return token_logprobs(
            picked,
            weight,
            x.labels,
            head_ids=x.head_ids,
            kept=x.kept,
            temperature=x.temperature,
            chunk=self._chunk,
        )
