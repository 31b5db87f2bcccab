"""Tools with the openai client. A small model calls nothing by itself, so the calls are asked for."""

import json

import openai
import pytest
from questions import QUIET, user

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
NAMED = {"type": "function", "function": {"name": "weather"}}
ASK = {"messages": user("What is the weather in Oslo?"), "tools": [WEATHER, CLOCK], "max_tokens": 200, "extra_body": QUIET}


def check_weather(call):
    assert call.type == "function" and call.id
    assert call.function.name == "weather"
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] in ("Oslo", "Paris") and arguments["days"] in (1, 2)


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_named_tool(client, model, temperature):
    reply = client.chat.completions.create(model=model, tool_choice=NAMED, temperature=temperature, seed=3, **ASK)
    message = reply.choices[0].message
    assert len(message.tool_calls) == 1
    check_weather(message.tool_calls[0])
    assert not message.content
    assert reply.choices[0].finish_reason in ("stop", "tool_calls")


def test_a_required_tool(client, model):
    reply = client.chat.completions.create(
        model=model, tool_choice="required", parallel_tool_calls=False, temperature=0, **ASK
    )
    calls = reply.choices[0].message.tool_calls
    assert len(calls) == 1 and calls[0].function.name in ("weather", "clock")
    assert reply.choices[0].finish_reason == "tool_calls"


def test_streamed_calls_are_the_plain_ones(client, model):
    plain = client.chat.completions.create(model=model, tool_choice=NAMED, temperature=0, **ASK).choices[0]
    stream = client.chat.completions.create(model=model, tool_choice=NAMED, temperature=0, stream=True, **ASK)
    calls, finish = {}, None
    for chunk in stream:
        choice = chunk.choices[0]
        finish = choice.finish_reason or finish
        for part in choice.delta.tool_calls or []:
            call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
            assert (part.id is None) == (part.function.name is None), "both in the first part, neither later"
            call["arguments"] += part.function.arguments or ""
    assert list(calls) == list(range(len(calls)))
    assert [(c["name"], json.loads(c["arguments"])) for c in calls.values()] == [
        (call.function.name, json.loads(call.function.arguments)) for call in plain.message.tool_calls
    ]
    assert finish == plain.finish_reason


def test_the_stream_helper(client, model):
    with client.chat.completions.stream(model=model, tool_choice=NAMED, temperature=0, **ASK) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [event.name for event in done] == ["weather"]
    assert final.choices[0].message.tool_calls[0].function.parsed_arguments == json.loads(done[0].arguments)


def test_a_round_trip(client, model):
    first = client.chat.completions.create(model=model, tool_choice=NAMED, temperature=0, **ASK).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "rain"}
    messages = [*ASK["messages"], first.model_dump(exclude_none=True), result]
    reply = client.chat.completions.create(
        model=model, messages=messages, tools=ASK["tools"], max_tokens=16, temperature=0, extra_body=QUIET
    )
    assert reply.choices[0].finish_reason in ("stop", "length", "tool_calls")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_tools_that_need_not_be_called(client, model, choice):
    reply = client.chat.completions.create(model=model, tool_choice=choice, temperature=0, **(ASK | {"max_tokens": 24}))
    message = reply.choices[0].message
    assert message.content or message.tool_calls
    if choice == "none":
        assert not message.tool_calls


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nobody"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "teapot"}]}, "tools[0].type"),
        ({"parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
    ids=range(7),
)
def test_bad_tools(client, model, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model, **(ASK | change))
    assert caught.value.param.startswith(param)
