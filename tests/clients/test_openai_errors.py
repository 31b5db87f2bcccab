"""Mistakes, as the exceptions that the openai client makes of them."""

import openai
import pytest
from conftest import KEY
from questions import QUIET, user

CHATS = [
    ({"temperature": 3}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 10**9}, "max_tokens"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop[0]"),
    ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"reasoning_effort": "huge"}, "reasoning_effort"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages[0].content[0].type"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"extra_body": {"top_k": -5}}, "top_k"),
]


@pytest.mark.parametrize(("change", "param"), CHATS, ids=[str(sorted(change)) + param for change, param in CHATS])
def test_bad_chats(client, model, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**({"model": model, "messages": user("x")} | change))
    assert caught.value.status_code == 400
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert caught.value.request_id


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], [[-1]], ["a", ""], [10**6]], ids=str)
def test_bad_prompts(client, model, prompt):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=model, prompt=prompt)
    assert caught.value.param.startswith("prompt")


def test_a_prompt_that_is_too_long(client, model):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, messages=user("word " * 100_000))
    assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model(client):
    for ask in [
        lambda: client.chat.completions.create(model="nothing", messages=user("x")),
        lambda: client.completions.create(model="nothing", prompt="x"),
        lambda: client.models.retrieve("nothing"),
    ]:
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "model_not_found"


def test_services_that_are_not_there(client, model):
    for ask in [
        lambda: client.embeddings.create(model=model, input="x"),
        lambda: client.moderations.create(input="x"),
        lambda: client.files.list(),
        lambda: client.batches.list(),
        lambda: client.images.generate(prompt="x"),
    ]:
        with pytest.raises(openai.NotFoundError) as caught:
            ask()
        assert caught.value.code == "not_found"


@pytest.mark.parametrize("key", ["wrong", "sk-"])
def test_wrong_keys(guarded, key):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=key, max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_the_right_key(guarded):
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as client:
        model = client.models.list().data[0].id
        reply = client.chat.completions.create(model=model, messages=user("Hi"), max_tokens=2, extra_body=QUIET)
        assert reply.choices[0].finish_reason


def test_unknown_fields_are_ignored_or_refused(client, guarded, model):
    arguments = {"model": model, "messages": user("Hi"), "max_tokens": 1, "extra_body": {"mood": "good"}}
    assert client.chat.completions.create(**arguments).choices
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=KEY, max_retries=0) as strict:
        with pytest.raises(openai.BadRequestError) as caught:
            strict.chat.completions.create(**arguments)
    assert (caught.value.code, caught.value.param) == ("unknown_parameter", "mood")


def test_a_server_that_is_not_there():
    with openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
