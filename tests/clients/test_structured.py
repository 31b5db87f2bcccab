"""Structured output with the openai client."""

import concurrent.futures
import json

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from questions import QUIET, user




SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
ASK = {"messages": user("Tell me about Ann."), "max_tokens": 200, "extra_body": QUIET}


def shaped(schema, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **more}}


@pytest.mark.parametrize("seed", range(5))
def test_a_schema_is_met(client, model, seed):
    reply = client.chat.completions.create(
        model=model, response_format=shaped(SCHEMA, strict=True), temperature=1.5, seed=seed, **ASK
    )
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


def test_a_schema_is_met_in_a_stream(client, model):
    stream = client.chat.completions.create(model=model, response_format=shaped(SCHEMA), temperature=0, stream=True, **ASK)
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_any_object(client, model):
    reply = client.chat.completions.create(model=model, response_format={"type": "json_object"}, temperature=0, **ASK)
    if reply.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(reply.choices[0].message.content), dict)
    else:
        assert reply.choices[0].message.content.lstrip().startswith("{")


def test_parse(client, model):
    """The client makes a schema of the class and an object of the answer."""
    class Short(BaseModel):
        ok: bool

    reply = client.chat.completions.parse(model=model, response_format=Short, temperature=0, **ASK)
    assert isinstance(reply.choices[0].message.parsed, Short)


def test_choices(client, model):
    arguments = ASK | {"extra_body": QUIET | {"structured_outputs": {"choice": ["yes", "no"]}}}
    assert client.chat.completions.create(model=model, **arguments).choices[0].message.content in ("yes", "no")


def test_a_regular_expression(client, model):
    arguments = ASK | {"extra_body": QUIET | {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}}
    text = client.chat.completions.create(model=model, **arguments).choices[0].message.content
    assert len(text) == 6 and text[3] == "-"


def test_the_thinking_is_free(client, model):
    reply = client.chat.completions.create(
        model=model,
        messages=user("Please work out 310 + 661."),
        response_format=shaped(SCHEMA),
        temperature=0,
        max_tokens=300,
        extra_body={"enable_thinking": True},
    )
    message = reply.choices[0].message
    assert reply.choices[0].finish_reason == "stop"
    assert message.reasoning_content
    jsonschema.validate(json.loads(message.content), SCHEMA)


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(?<x"}}},
        {"type": "yaml"},
        "json",
    ],
    ids=range(5),
)
def test_bad_formats(client, model, bad):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, response_format=bad, **ASK)
    assert caught.value.param.startswith("response_format")


@pytest.mark.parametrize("grammar", ["root ::= (", "start: start start", "start: nobody", "start: /(/"])
def test_bad_grammars(client, server, model, grammar):
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, **(ASK | {"extra_body": QUIET | {"structured_outputs": {"grammar": grammar}}}))
    assert server.get("/health").json()["status"] == "ok"


def test_a_schema_that_is_too_much_holds_up_nobody(client, model):
    """Nested alternatives, 6 ways 12 deep: enforced or refused within the time that a grammar has, while others go on."""
    schema = {"type": "integer"}
    for depth in range(12):
        others = [{"type": "object", "properties": {f"p{depth}{n}": {"const": n}}} for n in range(5)]
        schema = {"oneOf": [{"type": "object", "properties": {f"p{depth}": schema}}, *others]}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        heavy = pool.submit(
            client.with_options(timeout=60).chat.completions.create,
            model=model,
            response_format=shaped({"type": "object", "properties": {"x": schema}}),
            **(ASK | {"max_tokens": 8}),
        )
        plain = client.chat.completions.create(model=model, **(ASK | {"max_tokens": 4}))
        assert plain.usage.completion_tokens == 4
        try:
            assert heavy.result(60).choices
        except openai.BadRequestError as error:
            assert error.param.startswith("response_format")
