"""The Responses API with the openai client, which Codex and the agents' SDK speak."""

import json

import openai
import pytest
from pydantic import BaseModel
from questions import DENMARK, SUM, parts
from test_structured import SCHEMA

import jsonschema

ANSWER = parts(DENMARK)[1]
ASK = {"input": DENMARK["question"], "temperature": 0, "max_output_tokens": 20, "extra_body": {"enable_thinking": False}}
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


def test_a_text(client, model):
    reply = client.responses.create(model=model, **ASK)
    assert (reply.object, reply.status, reply.output_text) == ("response", "completed", ANSWER)
    assert reply.output[-1].type == "message" and reply.output[-1].role == "assistant"
    assert reply.usage.input_tokens == len(DENMARK["prompt_ids"])
    assert reply.usage.output_tokens == len(DENMARK["ids"])
    assert reply.error is None and reply.incomplete_details is None


def test_a_list_of_items(client, model):
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": DENMARK["question"]}]},
    ]
    reply = client.responses.create(model=model, **(ASK | {"input": items}))
    assert reply.output_text


def test_instructions(client, model):
    assert client.responses.create(model=model, instructions="Be brief.", **ASK).output_text


def test_events_of_a_stream(client, model):
    events = list(client.responses.create(model=model, stream=True, **ASK))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == ANSWER == events[-1].response.output_text
    ids = {event.item_id for event in events if hasattr(event, "item_id")}
    assert ids == {item.id for item in events[-1].response.output}


def test_the_stream_helper(client, model):
    with client.responses.stream(model=model, **ASK) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == ANSWER


async def test_asynchronous(aclient, model):
    assert (await aclient.responses.create(model=model, **ASK)).output_text == ANSWER
    stream = await aclient.responses.create(model=model, stream=True, **ASK)
    assert [event async for event in stream][-1].response.output_text == ANSWER


def test_reasoning_is_an_item(client, model):
    reply = client.responses.create(
        model=model, input=SUM["question"], temperature=0, max_output_tokens=66, extra_body={"enable_thinking": True}
    )
    assert reply.output[0].type == "reasoning"
    assert reply.output_text == parts(SUM)[1]
    assert reply.usage.output_tokens_details.reasoning_tokens > 0


def test_an_answer_that_is_cut(client, model):
    reply = client.responses.create(model=model, **(ASK | {"max_output_tokens": 3}))
    assert reply.status == "incomplete"
    assert reply.incomplete_details.reason == "max_output_tokens"


def test_a_tool_call_and_its_result(client, model):
    choice = {"type": "function", "name": "weather"}
    first = client.responses.create(model=model, tools=[TOOL], tool_choice=choice, **(ASK | {"max_output_tokens": 120}))
    call = first.output[-1]
    assert (call.type, call.name) == ("function_call", "weather")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Paris")
    items = [
        {"role": "user", "content": "What is the weather?"},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
    ]
    second = client.responses.create(model=model, tools=[TOOL], **(ASK | {"input": items}))
    assert second.status in ("completed", "incomplete")


def test_a_streamed_tool_call(client, model):
    choice = {"type": "function", "name": "weather"}
    arguments = ASK | {"max_output_tokens": 120}
    events = list(client.responses.create(model=model, tools=[TOOL], tool_choice=choice, stream=True, **arguments))
    deltas = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(done) == 1 and done[0].arguments == deltas
    assert json.loads(deltas)["city"] in ("Oslo", "Paris")


def test_a_conversation_by_its_id(client, model):
    first = client.responses.create(model=model, **ASK)
    second = client.responses.create(model=model, previous_response_id=first.id, **(ASK | {"input": "And of France?"}))
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    with pytest.raises(openai.APIStatusError) as caught:
        client.responses.create(model=model, previous_response_id="resp_nothing", **ASK)
    assert caught.value.status_code in (400, 404)


def test_a_schema(client, model):
    shape = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    reply = client.responses.create(model=model, text=shape, **(ASK | {"max_output_tokens": 100}))
    jsonschema.validate(json.loads(reply.output_text), SCHEMA)


def test_parse(client, model):
    class Short(BaseModel):
        ok: bool

    reply = client.responses.parse(model=model, text_format=Short, **(ASK | {"max_output_tokens": 60}))
    assert isinstance(reply.output_parsed, Short)


def test_what_codex_sends(client, model):
    reply = client.responses.create(
        model=model,
        input=[{"role": "developer", "content": "a"}, {"role": "developer", "content": "b"}, {"role": "user", "content": "Hi"}],
        tools=[
            TOOL,
            {"type": "custom", "name": "patch", "description": "x"},
            {"type": "web_search"},
            {"type": "namespace", "name": "files", "description": "x", "tools": [TOOL | {"name": "read"}]},
        ],
        tool_choice="auto",
        parallel_tool_calls=False,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="k",
        store=False,
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=16,
        extra_body={"client_metadata": {"a": "b"}},
    )
    assert reply.status in ("completed", "incomplete")


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"temperature": 3}, "temperature"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"max_output_tokens": -1}, "max_output_tokens"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ],
    ids=range(4),
)
def test_mistakes(client, model, change, param):
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=model, **(ASK | change))
    assert caught.value.param == param
