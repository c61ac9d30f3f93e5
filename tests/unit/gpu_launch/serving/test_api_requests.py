"""Bodies of requests: what they mean, and what is refused."""

from __future__ import annotations

import json

import pytest

from gpu_launch.serving import api_requests
from gpu_launch.serving.api_requests import RequestError, ServedModel
from gpu_launch.serving.steps import Sampling


def encode_chat(messages: list[dict[str, str]]) -> list[int]:
    return [len(message["content"]) for message in messages]


MODEL = ServedModel(
    name="tiny",
    context=100,
    vocabulary=50,
    encode=lambda text: [ord(letter) % 50 for letter in text],
    encode_chat=encode_chat,
)


def complete(**body):
    return api_requests.parse_completion(json.dumps(body).encode(), MODEL)


def chat(*messages, **body):
    return api_requests.parse_chat(json.dumps({"messages": list(messages)} | body).encode(), MODEL)


def say(content, role="user"):
    return {"role": role, "content": content}


def test_completion_of_a_text_and_of_tokens():
    """With OpenAI's defaults."""
    asked = complete(prompt="ab", seed=3)
    assert (asked.prompt, asked.max_tokens, asked.streams, asked.stops) == ((47, 48), 16, False, ())
    assert asked.sampling == Sampling(temperature=1.0, top_p=1.0, seed=3)
    assert complete(prompt=[1, 2]).prompt == complete(prompt=[[1, 2]]).prompt == (1, 2)
    assert complete(prompt=["ab"]).prompt == (47, 48)
    assert complete(prompt="x" * 95).max_tokens == 5
    assert complete(prompt="a").sampling.seed != complete(prompt="a").sampling.seed


def test_chat_has_all_that_is_left_by_default():
    asked = chat(say("be short", "system"), say([{"type": "text", "text": "a"}, {"type": "text", "text": "bc"}]))
    assert (asked.prompt, asked.max_tokens) == ((8, 3), 98)
    asked = chat(
        say("a"), max_completion_tokens=7, temperature=0, top_p=0.5, stop=["x", "yz"], stream=True, seed=-1,
        stream_options={"include_usage": True}, user="mia", n=1, tools=[], logprobs=False, model="tiny",
    )  # fmt: skip
    assert (asked.max_tokens, asked.stops, asked.streams, asked.has_usage) == (7, ("x", "yz"), True, True)
    assert asked.sampling == Sampling(temperature=0.0, top_p=0.5, seed=2**62 - 1)
    assert chat(say("a"), stop="x", max_tokens=None).stops == ("x",)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [50]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
        ({"prompt": "a", "temperature": 2.1}, "temperature"),
        ({"prompt": "a", "temperature": "0"}, "temperature"),
        ({"prompt": "a", "temperature": float("nan")}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "seed": 1.5}, "seed"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": "a", "stop": [""]}, "stop"),
        ({"prompt": "a", "stop": ["a"] * 5}, "stop"),
        ({"prompt": "a", "stop": "a" * 257}, "stop"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream_options": {}}, "stream_options"),
        ({"prompt": "a", "n": 2}, "n"),
        ({"prompt": "a", "echo": True}, "echo"),
        ({"prompt": "a", "logprobs": 3}, "logprobs"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
    ],
)
def test_refused_fields_are_named(body, param):
    with pytest.raises(RequestError) as refused:
        complete(**body)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.build_body()["error"]["type"] == "invalid_request_error"
    assert param in str(refused.value)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (["hi"], "messages[0].role"),
        ([say("a"), say("b", "tool")], "messages[1].role"),
        ([say(None)], "messages[0].content"),
        ([say([{"type": "image_url", "image_url": {}}])], "messages[0].content"),
        ([say("a")] * 1001, "messages"),
    ],
)
def test_refused_messages_are_named(messages, param):
    with pytest.raises(RequestError) as refused:
        chat(*messages)
    assert refused.value.param == param


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b"[" * 5000, b"\xff"])
def test_what_is_no_object_is_refused(body):
    with pytest.raises(RequestError, match="The body is not"):
        api_requests.parse_completion(body, MODEL)


def test_half_of_a_character_is_refused():
    """Tokenizers fail at it, which would be the server's error."""
    assert complete(prompt="\U0001f600").prompt
    for ask in (lambda text: complete(prompt=text), lambda text: chat(say(text))):
        with pytest.raises(RequestError, match="half of a surrogate pair") as refused:
            ask("cut here: \ud83d")
        assert refused.value.status == 400


def test_too_long_prompts_and_answers_have_openais_code():
    """And unknown models theirs."""
    for body in ({"prompt": "x" * 100}, {"prompt": "x" * 50, "max_tokens": 51}):
        with pytest.raises(RequestError, match="maximum context length is 100 tokens, and the prompt has") as refused:
            complete(**body)
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(RequestError, match="'large' does not exist: this server has tiny") as unknown:
        complete(prompt="a", model="large")
    assert (unknown.value.status, unknown.value.code) == (404, "model_not_found")


def test_model_without_a_template_has_no_chat():
    """And a template may refuse what it is given."""
    plain = ServedModel(name="base", context=9, vocabulary=50, encode=MODEL.encode, encode_chat=None)
    data = json.dumps({"messages": [say("a")]}).encode()
    with pytest.raises(RequestError, match="base has no chat template"):
        api_requests.parse_chat(data, plain)

    def refuse(messages):
        raise ValueError("roles must alternate")

    strict = ServedModel(name="base", context=9, vocabulary=50, encode=MODEL.encode, encode_chat=refuse)
    with pytest.raises(RequestError, match="refuses these messages: roles must alternate"):
        api_requests.parse_chat(data, strict)
