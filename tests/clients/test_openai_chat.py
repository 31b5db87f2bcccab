"""Chats with the openai client: plain, streamed, with the stream helper, asynchronous."""

import asyncio
import math

import openai
import pytest
from questions import DENMARK, QUIET, ROWS, SUM, parts, request, user


def ids(rows):
    return [f"{row['question'][:16]}-{'thinking' if row['enable_thinking'] else 'quiet'}" for row in rows]


@pytest.fixture(params=ROWS, ids=ids(ROWS))
def row(request):
    return request.param


def joined(chunks, name):
    texts = (getattr(choice.delta, name, None) for chunk in chunks for choice in chunk.choices)
    return "".join(text for text in texts if text)


def check_usage(usage, row):
    assert usage.prompt_tokens == len(row["prompt_ids"])
    assert usage.completion_tokens == len(row["ids"])
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 <= usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
    assert usage.completion_tokens_details.reasoning_tokens <= usage.completion_tokens


def test_golden_answers(client, model, row):
    thinking, answer = parts(row)
    reply = client.chat.completions.create(model=model, **request(row))
    choice = reply.choices[0]
    assert (reply.object, reply.model, choice.index) == ("chat.completion", model, 0)
    assert choice.message.role == "assistant"
    assert (choice.message.content or "") == answer
    assert getattr(choice.message, "reasoning_content", "").rstrip() == thinking
    assert choice.finish_reason == row["finish"]
    check_usage(reply.usage, row)


def test_golden_answers_streamed(client, model, row):
    thinking, answer = parts(row)
    with client.chat.completions.create(
        model=model, stream=True, stream_options={"include_usage": True}, **request(row)
    ) as stream:
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert joined(chunks, "content") == answer
    assert joined(chunks, "reasoning_content").rstrip() == thinking
    assert joined(chunks, "reasoning") == joined(chunks, "reasoning_content")
    *body, last, usage = chunks
    assert all(chunk.choices[0].finish_reason is None for chunk in body)
    assert last.choices[0].finish_reason == row["finish"]
    assert not last.choices[0].delta.content
    assert usage.choices == []
    check_usage(usage.usage, row)
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_stream_helper(client, model, row):
    """The helper puts the chunks together itself and is strict about them."""
    _, answer = parts(row)
    with client.chat.completions.stream(model=model, **request(row)) as stream:
        told = "".join(event.delta for event in stream if event.type == "content.delta")
        assert told == answer
        if row["finish"] == "length":
            with pytest.raises(openai.LengthFinishReasonError):
                stream.get_final_completion()
            return
        final = stream.get_final_completion()
    assert (final.choices[0].message.content or "") == answer
    assert final.choices[0].finish_reason == row["finish"]


async def test_asynchronous(aclient, model, row):
    reply = await aclient.chat.completions.create(model=model, **request(row))
    assert (reply.choices[0].message.content or "") == parts(row)[1]


async def test_asynchronous_streams(aclient, model, row):
    stream = await aclient.chat.completions.create(model=model, stream=True, **request(row))
    chunks = [chunk async for chunk in stream]
    assert joined(chunks, "content") == parts(row)[1]


async def test_many_at_once(aclient, model):
    replies = await asyncio.gather(
        *(aclient.chat.completions.create(model=model, **request(row)) for row in [*ROWS, *ROWS])
    )
    for row, reply in zip([*ROWS, *ROWS], replies):
        assert (reply.choices[0].message.content or "") == parts(row)[1]


def test_conversations(client, model):
    history = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello."}]},
        {"role": "assistant", "content": "Hello!", "reasoning_content": "A greeting."},
        {"role": "developer", "content": "Go on."},
        {"role": "user", "content": "What is the capital of Denmark?"},
    ]
    reply = client.chat.completions.create(model=model, messages=history, temperature=0, max_tokens=12, extra_body=QUIET)
    assert reply.choices[0].message.content


def test_tool_history(client, model):
    call = {"id": "call_1", "type": "function", "function": {"name": "capital", "arguments": '{"country": "Denmark"}'}}
    history = [
        *user("What is the capital of Denmark?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Copenhagen"},
    ]
    reply = client.chat.completions.create(model=model, messages=history, max_tokens=8, temperature=0, extra_body=QUIET)
    assert reply.choices[0].finish_reason in {"stop", "length"}


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
def test_reasoning_effort(client, model, effort):
    messages = user(SUM["question"])
    reply = client.chat.completions.create(
        model=model, messages=messages, reasoning_effort=effort, temperature=0, max_tokens=80
    )
    thought = bool(getattr(reply.choices[0].message, "reasoning_content", None))
    assert thought == (effort != "none")
    assert (reply.usage.completion_tokens_details.reasoning_tokens > 0) == thought


def test_stop_strings(client, model):
    reply = client.chat.completions.create(model=model, **request(DENMARK), stop=["Copen", "zebra"])
    assert reply.choices[0].message.content == "The capital of Denmark is "
    assert reply.choices[0].finish_reason == "stop"


def test_the_answer_may_be_cut(client, model):
    reply = client.chat.completions.create(model=model, **(request(DENMARK) | {"max_tokens": 3}))
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage.completion_tokens == 3


def test_max_completion_tokens(client, model):
    arguments = request(DENMARK)
    del arguments["max_tokens"]
    reply = client.chat.completions.create(model=model, max_completion_tokens=2, **arguments)
    assert reply.usage.completion_tokens == 2


def test_several_answers(client, model):
    arguments = request(DENMARK) | {"temperature": 1.5, "seed": 5}
    reply = client.chat.completions.create(model=model, n=3, **arguments)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    alone = client.chat.completions.create(model=model, **(arguments | {"seed": 6}))
    assert reply.choices[1].message.content == alone.choices[0].message.content, "choice 1 is the one of the next seed"


def test_seeds(client, model):
    draw = lambda seed: client.chat.completions.create(  # noqa: E731
        model=model, **(request(DENMARK) | {"temperature": 1.5, "max_tokens": 20, "seed": seed})
    )
    texts = {seed: draw(seed).choices[0].message.content for seed in range(6)}
    assert len(set(texts.values())) > 1
    assert all(draw(seed).choices[0].message.content == text for seed, text in texts.items())


def test_log_probabilities(client, model):
    reply = client.chat.completions.create(model=model, logprobs=True, top_logprobs=4, **request(DENMARK))
    tokens = reply.choices[0].logprobs.content
    assert len(tokens) == len(DENMARK["ids"])
    for token in tokens:
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 4
        assert token.top_logprobs[0].logprob == token.logprob, "greedy takes the likeliest"
        assert [top.logprob for top in token.top_logprobs] == sorted((top.logprob for top in token.top_logprobs), reverse=True)
        assert token.token == bytes(token.bytes).decode()


def test_log_probabilities_are_natural_and_of_one_distribution(client, model):
    """At every place the likely tokens have nearly all of the mass; completions tell the same figures."""
    messages = client.chat.completions.create(
        model=model, logprobs=True, top_logprobs=20, **(request(DENMARK) | {"temperature": 1, "seed": 3})
    )
    for token in messages.choices[0].logprobs.content:
        mass = sum(math.exp(top.logprob) for top in token.top_logprobs)
        assert 0.2 < mass <= 1 + 1e-5, "base 10 or unnormalised figures would not add up"
    chat = client.chat.completions.create(model=model, logprobs=True, top_logprobs=3, **request(DENMARK))
    plain = client.completions.create(
        model=model, prompt=DENMARK["prompt_ids"], logprobs=3, temperature=0, max_tokens=len(DENMARK["ids"])
    )
    assert [token.logprob for token in chat.choices[0].logprobs.content] == plain.choices[0].logprobs.token_logprobs


def test_log_probabilities_streamed(client, model):
    stream = client.chat.completions.create(model=model, logprobs=True, top_logprobs=1, stream=True, **request(DENMARK))
    tokens = [token for chunk in stream for choice in chunk.choices if choice.logprobs for token in choice.logprobs.content]
    plain = client.chat.completions.create(model=model, logprobs=True, top_logprobs=1, **request(DENMARK))
    assert [(t.token, t.logprob) for t in tokens] == [(t.token, t.logprob) for t in plain.choices[0].logprobs.content]


def test_logit_bias(client, model):
    banned = {str(DENMARK["ids"][0]): -100}
    reply = client.chat.completions.create(model=model, logit_bias=banned, **request(DENMARK))
    assert not reply.choices[0].message.content.startswith("The capital")


def test_penalties_and_sampling(client, model):
    reply = client.chat.completions.create(
        model=model,
        messages=user("Hi"),
        max_tokens=8,
        temperature=0.9,
        top_p=0.8,
        presence_penalty=1.5,
        frequency_penalty=0.5,
        seed=1,
        user="ann",
        metadata={"team": "a"},
        store=False,
        service_tier="auto",
        extra_body={"top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1, **QUIET},
    )
    assert reply.usage.completion_tokens <= 8


def test_prompt_token_ids(client, model):
    arguments = request(DENMARK)
    arguments["extra_body"] |= {"return_token_ids": True}
    reply = client.chat.completions.create(model=model, **arguments)
    assert reply.prompt_token_ids == DENMARK["prompt_ids"]
    assert reply.choices[0].token_ids == DENMARK["ids"]


def test_a_repeated_prompt_is_remembered(client, model):
    long = user("one two three four five six seven " * 40)
    ask = lambda: client.chat.completions.create(model=model, messages=long, max_tokens=1, extra_body=QUIET)  # noqa: E731
    ask()
    usage = ask().usage
    assert usage.prompt_tokens_details.cached_tokens > usage.prompt_tokens // 2


def test_a_client_that_leaves_does_not_disturb_others(client, model):
    for _ in range(3):
        with client.chat.completions.create(
            model=model, messages=user("Count."), stream=True, max_tokens=500, extra_body={"ignore_eos": True}
        ) as stream:
            next(iter(stream))
    assert client.chat.completions.create(model=model, **request(DENMARK)).choices[0].message.content == parts(DENMARK)[1]


def test_raw_responses_have_the_request_id(client, model):
    raw = client.chat.completions.with_raw_response.create(
        model=model, extra_headers={"x-request-id": "suite-7"}, **request(DENMARK)
    )
    assert raw.headers["x-request-id"] == "suite-7"
    assert raw.parse()._request_id == "suite-7"
