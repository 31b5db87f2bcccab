"""Completions with the openai client."""

import pytest
from questions import DENMARK, ROWS


@pytest.mark.parametrize("row", ROWS, ids=range(len(ROWS)))
def test_golden_continuations(client, model, row):
    answer = row["answer"].removesuffix("<|im_end|>")
    more = {"model": model, "temperature": 0, "max_tokens": len(row["ids"])}
    by_ids = client.completions.create(prompt=row["prompt_ids"], **more)
    assert by_ids.choices[0].text == answer
    assert by_ids.choices[0].finish_reason == row["finish"]
    streamed = client.completions.create(prompt=row["prompt"], stream=True, **more)
    assert "".join(choice.text for chunk in streamed for choice in chunk.choices) == answer


def test_lists_of_prompts(client, model):
    reply = client.completions.create(model=model, prompt=["One", "Two", "Three"], max_tokens=2, n=2)
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3, 4, 5]


def test_lists_of_token_ids(client, model):
    ids = DENMARK["prompt_ids"]
    reply = client.completions.create(model=model, prompt=[ids, ids], max_tokens=12, temperature=0)
    assert reply.choices[0].text == reply.choices[1].text == "The capital of Denmark is Copenhagen."
    assert reply.usage.prompt_tokens == 2 * len(ids)


def test_the_documented_default_length(client, model):
    reply = client.completions.create(model=model, prompt="Once", extra_body={"ignore_eos": True})
    assert reply.usage.completion_tokens == 16


def test_echo_with_log_probabilities(client, model):
    """What a loglikelihood is computed from."""
    ids = DENMARK["prompt_ids"]
    reply = client.completions.create(model=model, prompt=[ids], echo=True, logprobs=1, max_tokens=1, temperature=0)
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.tokens) == len(ids) + 1
    assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
    assert all(logprob <= 0 for logprob in logprobs.token_logprobs[1:])
    for token, own, top, offset in list(
        zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, logprobs.text_offset)
    )[1:]:
        assert top[token] == own
        assert max(top.values()) >= own
        assert reply.choices[0].text[offset:].startswith(token) or token == "<|im_end|>"


def test_echo_of_a_prompt_alone(client, model):
    reply = client.completions.create(model=model, prompt="Hello there", echo=True, logprobs=0, max_tokens=0)
    assert reply.choices[0].text == "Hello there"
    assert reply.usage.completion_tokens == 0
    assert len(reply.choices[0].logprobs.tokens) == reply.usage.prompt_tokens


def test_streams_with_usage(client, model):
    chunks = list(
        client.completions.create(
            model=model, prompt="Once", stream=True, stream_options={"include_usage": True}, max_tokens=5
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens <= 5
    assert [c.choices[0].finish_reason for c in chunks[:-1]].count(None) == len(chunks) - 2


@pytest.mark.parametrize("stop", ["hagen", ["zebra", "hagen"]])
def test_stop_strings(client, model, stop):
    reply = client.completions.create(model=model, prompt=DENMARK["prompt"], stop=stop, temperature=0, max_tokens=20)
    assert reply.choices[0].text == "The capital of Denmark is Copen"


def test_stop_strings_kept(client, model):
    reply = client.completions.create(
        model=model,
        prompt=DENMARK["prompt"],
        stop="hagen",
        temperature=0,
        max_tokens=20,
        extra_body={"include_stop_str_in_output": True},
    )
    assert reply.choices[0].text == "The capital of Denmark is Copenhagen"


async def test_asynchronous(aclient, model):
    reply = await aclient.completions.create(model=model, prompt=DENMARK["prompt"], temperature=0, max_tokens=12)
    assert reply.choices[0].text == "The capital of Denmark is Copenhagen."
