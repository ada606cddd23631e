"""A model with the router of a large one, and an engine whose long answers cost nothing: episodes of megabytes."""

import json

from aiohttp import web

from tests.support.fake_engine import FakeEngine, Oracle

LAYERS, TOP_K, EXPERTS = 48, 8, 64
ROW_NBYTES = LAYERS * TOP_K


class Repeating(FakeEngine):
    """Says the same to every prompt of a length, so that an answer of megabytes is made once and sent as it is."""

    def __init__(self, tokens):
        super().__init__(Oracle(layers=LAYERS, top_k=TOP_K, experts=EXPERTS, stop_every=0))
        self.tokens, self._answers = tokens, {}

    async def _generate(self, request):
        body = await request.json()
        length = len(body["token_ids"])
        if length not in self._answers:
            sampling = body["sampling_params"] | {"max_tokens": self.tokens - length, "top_k": -1, "logprobs": 0}
            self._answers[length] = json.dumps({"choices": [self.choice([1] * length, sampling)]}).encode()
        label = f'"version": "{self.version}"'.encode()
        return web.Response(
            body=self._answers[length].replace(b'"version": "0"', label), content_type="application/json"
        )


def wide_model(directory, model_dir):
    """`model_dir` again, in `directory`/model, with the router's shape of `Repeating`."""
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"num_hidden_layers": LAYERS, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    model = directory / "model"
    model.mkdir()
    for file in model_dir.iterdir():
        (model / file.name).symlink_to(file)
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(config))
    return model
