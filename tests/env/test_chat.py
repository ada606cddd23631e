"""Rendering by ids: a conversation goes on exactly where the sampled ids end, whatever the template does."""

import json
import shutil

import pytest

from shmrl.config.shape import ModelShape
from shmrl.env.chat import ChatFormat, chat_format, parse_tool_calls
from shmrl.errors import EnvError
from tests.support.model_dir import EOS, IM_END, IM_START

USER = {"role": "user", "content": "ab"}
NEWLINE = 198


def letters(text):
    return [64 + ord(letter) - ord("a") for letter in text]


@pytest.fixture
def with_template(model_dir, tmp_path):
    """A copy of the model directory with another chat template, in the file of its own."""

    def make(text):
        directory = tmp_path / "model"
        shutil.copytree(model_dir, directory)
        (directory / "chat_template.jinja").write_text(text)
        return ChatFormat(directory)

    return make


def test_a_prompt_ends_where_the_assistant_speaks(model_dir):
    chat = chat_format(str(model_dir))
    begin = [IM_START, *letters("user"), NEWLINE, *letters("ab"), IM_END, NEWLINE]
    assert chat.prompt([USER]) == [*begin, IM_START, *letters("assistant"), NEWLINE]
    assert chat.text(chat.prompt([USER])) == "user\nab\nassistant\n"
    assert (chat.stop_ids, chat.shape) == ([EOS, IM_END], ModelShape(4, (0, 1, 2, 3), 8, 2, 264, 1 << 16))


def test_a_turn_goes_on_after_its_own_end_token(model_dir):
    chat = chat_format(str(model_dir))
    prompt = chat.prompt([USER])
    whole = chat.prompt([USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "c"}])
    ended = [*prompt, *letters("x"), IM_END]
    assert ended + chat.continuation(ended, [{"role": "user", "content": "c"}]) == whole


def test_a_cut_turn_gets_its_end_token_first(model_dir):
    chat = chat_format(str(model_dir))
    prompt = chat.prompt([USER])
    whole = chat.prompt([USER, {"role": "assistant", "content": "x"}, {"role": "user", "content": "c"}])
    cut = [*prompt, *letters("x")]
    assert cut + chat.continuation(cut, [{"role": "user", "content": "c"}]) == whole
    assert chat.continuation([*cut, EOS], [{"role": "user", "content": "c"}])[0] == IM_END


def test_a_template_that_rewrites_old_turns_is_refused(with_template):
    chat = with_template("{{ messages | length }}{% for m in messages %}[{{ m.content }}]{% endfor %}")
    with pytest.raises(EnvError, match="rewrites a turn"):
        chat.continuation([1], [USER])


def test_a_template_that_strips_old_thoughts_keeps_the_ids(with_template):
    """Qwen3's way: what stands before </think> is dropped from a turn when it is not the last one."""
    chat = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ids = [*chat.prompt([USER]), *chat.reply_ids("<think>hm</think>x")]
    assert "hm" in chat.text(ids + chat.continuation(ids, [USER]))


def test_a_reply_ends_with_the_templates_token(model_dir):
    assert chat_format(str(model_dir)).reply_ids("ba") == [*letters("ba"), IM_END]


def test_a_template_cannot_reach_python(with_template):
    chat = with_template("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(EnvError, match="SecurityError"):
        chat.prompt([USER])


def test_a_template_may_refuse(with_template):
    chat = with_template("{{ raise_exception('no system role') }}")
    with pytest.raises(EnvError, match="no system role"):
        chat.prompt([USER])


def test_missing_files_are_named(tmp_path, model_dir):
    with pytest.raises(EnvError, match=r"tokenizer\.json: No such file"):
        ChatFormat(tmp_path)
    shutil.copytree(model_dir, tmp_path / "m")
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps({}))
    with pytest.raises(EnvError, match="no chat_template"):
        ChatFormat(tmp_path / "m")


def test_tool_calls_are_parsed_and_nonsense_stays_text():
    text = 'hm <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><tool_call>{"nom": 1}</tool_call>'
    content, calls = parse_tool_calls(text)
    assert content == 'hm <tool_call>{"nom": 1}</tool_call>'
    assert calls == [{"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}]
    assert parse_tool_calls("plain ") == ("plain ", [])
    assert parse_tool_calls(text, known=2)[1][0]["id"] == "call_2"


def test_a_template_sees_the_arguments_of_a_call_as_a_map(model_dir):
    """OpenAI's clients have them as text; a template that puts text into JSON would quote it."""
    chat = chat_format(str(model_dir))
    call = {"id": "call_0", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>' in chat.text(chat.prompt(asked))
    call["function"]["arguments"] = "no json"
    assert '"arguments": "no json"' in chat.text(chat.prompt(asked))
