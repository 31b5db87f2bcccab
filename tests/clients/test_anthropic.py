"""Messages with the anthropic client, which Claude Code speaks."""

import json

import anthropic
import pytest
from conftest import KEY
from questions import DENMARK, SUM, parts, user

ANSWER = parts(DENMARK)[1]
ASK = {"messages": user(DENMARK["question"]), "max_tokens": 20, "extra_body": {"temperature": 0}, "thinking": {"type": "disabled"}}
THINK = {
    "messages": user(SUM["question"]),
    "max_tokens": 2000,
    "extra_body": {"temperature": 0},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
}
TOOL = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Oslo", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "weather"}}


def test_a_message(claude, model):
    reply = claude.messages.create(model=model, **ASK)
    assert (reply.type, reply.role, reply.stop_reason, reply.stop_sequence) == ("message", "assistant", "end_turn", None)
    assert [block.type for block in reply.content] == ["text"]
    assert reply.content[0].text == ANSWER
    assert reply.usage.output_tokens == len(DENMARK["ids"])


def test_events_of_a_stream(claude, model):
    events = list(claude.messages.create(model=model, stream=True, **ASK))
    kinds = [event.type for event in events if event.type != "ping"]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text == ANSWER
    delta = next(event for event in events if event.type == "message_delta")
    assert delta.delta.stop_reason == "end_turn" and delta.usage.output_tokens == len(DENMARK["ids"])


def test_the_stream_helper(claude, model):
    with claude.messages.stream(model=model, **ASK) as stream:
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().content[0].text == ANSWER


async def test_asynchronous(aclaude, model):
    assert (await aclaude.messages.create(model=model, **ASK)).content[0].text == ANSWER
    async with aclaude.messages.stream(model=model, **ASK) as stream:
        assert "".join([text async for text in stream.text_stream]) == ANSWER


def test_system_texts_and_blocks(claude, model):
    for system in ["Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]]:
        assert claude.messages.create(model=model, system=system, **ASK).content[0].text


def test_the_answer_may_be_cut(claude, model):
    assert claude.messages.create(model=model, **(ASK | {"max_tokens": 3})).stop_reason == "max_tokens"


def test_stop_sequences(claude, model):
    reply = claude.messages.create(model=model, stop_sequences=["Copen"], **ASK)
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", "Copen")
    assert reply.content[0].text == "The capital of Denmark is "


def test_thinking_is_a_block(claude, model):
    reply = claude.messages.create(model=model, **THINK)
    thinking, answer = parts(SUM)
    assert [block.type for block in reply.content] == ["thinking", "text"]
    assert reply.content[0].thinking.rstrip() == thinking
    assert reply.content[1].text == answer


def test_thinking_in_a_stream(claude, model):
    with claude.messages.stream(model=model, **THINK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert "thinking" in kinds and "text" in kinds
    assert [block.type for block in final.content] == ["thinking", "text"]


def test_a_tool_call_and_its_result(claude, model):
    arguments = ASK | FORCED | {"max_tokens": 120}
    first = claude.messages.create(model=model, **arguments)
    call = first.content[-1]
    assert first.stop_reason == "tool_use"
    assert (call.type, call.name) == ("tool_use", "weather") and call.input["city"] in ("Oslo", "Paris")
    messages = [
        *ASK["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]},
    ]
    second = claude.messages.create(model=model, **(ASK | {"messages": messages, "tools": [TOOL]}))
    assert second.stop_reason in ("end_turn", "max_tokens", "tool_use")


def test_a_streamed_tool_call(claude, model):
    arguments = ASK | FORCED | {"max_tokens": 120}
    events = list(claude.messages.create(model=model, stream=True, **arguments))
    start = [event.content_block for event in events if event.type == "content_block_start"][-1]
    assert (start.type, start.name) == ("tool_use", "weather")
    text = "".join(
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
    )
    assert json.loads(text)["city"] in ("Oslo", "Paris")


@pytest.mark.parametrize("more", [{}, {"system": "Be brief."}, {"tools": [TOOL]}], ids=["plain", "system", "tools"])
def test_count_tokens(claude, model, more):
    arguments = {"messages": ASK["messages"], "thinking": {"type": "disabled"}} | more
    count = claude.messages.count_tokens(model=model, **arguments).input_tokens
    used = claude.messages.create(model=model, max_tokens=1, **arguments).usage
    assert count == used.input_tokens + (used.cache_read_input_tokens or 0) + (used.cache_creation_input_tokens or 0)


def test_what_claude_code_sends(claude, model):
    reply = claude.beta.messages.create(
        model=model,
        max_tokens=8,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=a1b2c3;"},
            {"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Hello."}]},
            {"role": "user", "content": "Go on."},
        ],
        tools=[TOOL],
        metadata={"user_id": "u"},
        betas=["interleaved-thinking-2025-05-14"],
    )
    assert reply.type == "message"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"extra_body": {"temperature": 3}}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"tools": [{"name": ""}]}, "tools[0]"),
    ],
    ids=range(5),
)
def test_mistakes(claude, model, change, field):
    with pytest.raises(anthropic.BadRequestError) as caught:
        claude.messages.create(model=model, **(ASK | change))
    body = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert field in body["error"]["message"]


def test_an_unknown_model(claude):
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(model="nothing", **ASK)
    assert caught.value.body["error"]["type"] == "not_found_error"


def test_keys(guarded):
    with anthropic.Anthropic(base_url=guarded.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as caught:
            stranger.messages.create(model="tiny", **ASK)
    assert caught.value.body["error"]["type"] == "authentication_error"
    with anthropic.Anthropic(base_url=guarded.url, api_key=KEY, max_retries=0) as friend:
        assert friend.messages.create(model="tiny", **ASK).content[0].text == ANSWER
