"""What is refused at the door, and how it is said."""

import json
from pathlib import Path

import pytest

from shmrl.inference.embedded.params import BadRequest, Limits, SamplingParams

LIMITS = Limits(vocab=512, max_model_len=1024, max_logprobs=20)
RECORDED = Path(__file__).parents[1] / "data" / "vllm" / "v0.32.0_v1runner_logprobs_21_over_limit.json"


def test_logprobs_over_the_limit_is_vllms_message() -> None:
    with pytest.raises(BadRequest) as caught:
        SamplingParams.parse({"logprobs": 21}, LIMITS)
    recorded = json.loads(RECORDED.read_text())["body"]["error"]
    assert (str(caught.value), caught.value.param) == (recorded["message"], recorded["param"])
    with pytest.raises(BadRequest, match="logprobs of 512, which is greater than max allowed: 20"):
        SamplingParams.parse({"logprobs": -1}, LIMITS)
    assert SamplingParams.parse({"logprobs": -1}, Limits(512, 1024, -1)).logprobs == 512


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1}, "unknown sampling parameter 'temprature'"),
        ({"temperature": -1}, r"temperature must be at least 0 and finite, got -1"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": "hot"}, "temperature must be int or float, got 'hot'"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"n": 0}, "n must be at least 1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens must be int"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"stop": [""]}, "stop must be without empty strings"),
        ({"stop": [1]}, "stop must be a list of str"),
        ({"stop_token_ids": [512]}, "stop_token_ids must be below 512"),
        ({"seed": "x"}, "seed must be int"),
    ],
)
def test_refused(given: dict, message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        SamplingParams.parse(given, LIMITS)


def test_none_is_the_default_and_minus_one_no_limit() -> None:
    params = SamplingParams.parse({"top_k": -1, "top_p": None, "stop": "x", "temperature": 1}, LIMITS)
    assert params == SamplingParams(stop=("x",))
    assert SamplingParams.parse({"max_tokens": None, "min_tokens": 99}, LIMITS).max_tokens is None
    assert not params.truncates
