"""Everything that is no answer of the model, and the bodies of all answers against the OpenAPI document."""

import pytest
import requests
from conftest import KEY
from questions import DENMARK, QUIET, SUM, user

CHAT = {"messages": user(DENMARK["question"]), "temperature": 0, "max_tokens": 12, **QUIET}
THINKING = {"messages": user(SUM["question"]), "temperature": 0, "max_tokens": 66}
MORE = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
COMPLETION = {"prompt": ["Hello", "Bye"], "max_tokens": 4, "echo": True, "logprobs": 2, "return_token_ids": True}


@pytest.mark.parametrize("body", [CHAT, THINKING, CHAT | MORE, CHAT | {"n": 2}], ids=["plain", "thinking", "more", "two"])
def test_chat_bodies_are_as_documented(server, conforms, body):
    conforms("ChatCompletion", server.post("/v1/chat/completions", body).json())
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, done = server.events("/v1/chat/completions", body | usage)
    assert done == "[DONE]"
    for chunk in chunks:
        conforms("ChatCompletionChunk", chunk)


def test_completion_bodies_are_as_documented(server, conforms):
    conforms("Completion", server.post("/v1/completions", COMPLETION).json())
    *chunks, done = server.events("/v1/completions", COMPLETION | {"stream": True})
    assert done == "[DONE]"
    for chunk in chunks:
        conforms("CompletionChunk", chunk)


QUESTION = {"input": DENMARK["question"], "max_output_tokens": 12, "temperature": 0, "enable_thinking": False}
MESSAGE = {"messages": CHAT["messages"], "max_tokens": 12, "thinking": {"type": "disabled"}}


@pytest.mark.parametrize(
    ("path", "body", "whole", "event"),
    [
        ("/v1/responses", QUESTION, "Response", "ResponseEvent"),
        ("/v1/responses", QUESTION | {"enable_thinking": True}, "Response", "ResponseEvent"),
        ("/v1/messages", MESSAGE, "ClaudeAnswer", "ClaudeEvent"),
        ("/v1/messages", MESSAGE | {"thinking": {"type": "adaptive"}}, "ClaudeAnswer", "ClaudeEvent"),
    ],
    ids=["response", "response, thinking", "message", "message, thinking"],
)
def test_bodies_of_the_other_apis_are_as_documented(server, conforms, path, body, whole, event):
    conforms(whole, server.post(path, body).json())
    for data in server.events(path, body | {"stream": True}):
        if data != "[DONE]":
            conforms(event, data)


def test_kept_responses(server, conforms):
    kept = server.post("/v1/responses", QUESTION).json()
    path = f"/v1/responses/{kept['id']}"
    assert server.get(path).json() == kept
    conforms("InputItems", server.get(path + "/input_items").json())
    conforms("RemovedResponse", requests.delete(server.url + path, timeout=60).json())
    assert server.get(path).status_code == 404


PROMPTS = {
    "/v1/chat/completions/render": (CHAT, "RenderedPrompt"),
    "/v1/chat/completions/input_tokens": (CHAT, "InputTokens"),
    "/apply-template": (CHAT, "PromptText"),
    "/v1/responses/input_tokens": (QUESTION, "InputTokens"),
    "/v1/messages/count_tokens": (MESSAGE, "ClaudeTokens"),
}


@pytest.mark.parametrize("path", PROMPTS)
def test_prompts_without_answers(server, conforms, path):
    body, component = PROMPTS[path]
    told = server.post(path, body).json()
    conforms(component, told)
    if "input_tokens" in told:
        assert told["input_tokens"] == len(DENMARK["prompt_ids"])
    if "prompt" in told:
        assert told["prompt"] == DENMARK["prompt"]


def test_extras_are_as_documented(server, conforms):
    more = {"timings": True, "prompt_logprobs": 2, "return_token_ids": True}
    conforms("ChatCompletion", server.post("/v1/chat/completions", CHAT | more).json())
    conforms("Completion", server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 2} | more).json())
    streamed = {"timings_per_token": True, "return_progress": True, "stream": True}
    for chunk in server.events("/v1/chat/completions", CHAT | streamed)[:-1]:
        conforms("ChatCompletionChunk", chunk)


def test_tokens(server, conforms):
    asked = {"prompt": "Hello, wörld", "with_pieces": True, "return_token_strs": True}
    tokens = server.post("/tokenize", asked).json()
    conforms("Tokens", tokens)
    text = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    conforms("Text", text)
    assert text["text"] == "Hello, wörld"
    chat = server.post("/tokenize", {"messages": CHAT["messages"], **QUIET}).json()
    assert chat["tokens"] == DENMARK["prompt_ids"]


FACTS = {
    "/version": "Version",
    "/props": "Properties",
    "/slots": "Slots",
    "/tokenizer_info": "TokenizerInfo",
    "/model_info": "ModelInfo",
    "/server_info": "ServerInfo",
    "/v1/loads": "Loads",
    "/get_load": "OldLoads",
    "/load": "Load",
}


@pytest.mark.parametrize("path", FACTS)
def test_facts(server, conforms, path):
    conforms(FACTS[path], server.get(path).json())


def test_a_request_can_be_ended(server, conforms):
    endless = {"messages": user("Count."), "stream": True, "ignore_eos": True, "max_tokens": 20_000, **QUIET}
    with server.post("/v1/chat/completions", endless, stream=True, headers={"x-request-id": "to-end"}) as reply:
        lines = reply.iter_lines()
        next(lines)
        slots = server.get("/slots").json()
        conforms("Slots", slots)
        assert "to-end" in [slot["request_id"] for slot in slots]
        aborted = server.post("/abort_request", {"rid": "to-end"}).json()
        conforms("Aborted", aborted)
        assert len(aborted["aborted"]) == 1
        assert [line for line in lines if line][-1] == b"data: [DONE]"
    assert server.post("/abort_request", {"rid": "to-end"}).status_code == 404


def test_models(client, model, server, conforms):
    conforms("ModelList", server.get("/v1/models").json())
    conforms("Model", server.get(f"/v1/models/{model}").json())
    found = client.models.retrieve(model)
    assert (found.id, found.object) == (model, "model")
    assert found.max_model_len == found.context_length > 0


def test_health(server, conforms):
    for path in ["/health", "/health/live", "/health/ready"]:
        reply = server.get(path)
        assert reply.status_code == 200
        conforms("Health", reply.json())


def test_metrics_count_requests(server):
    def count():
        lines = server.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("qwill_") and 'endpoint="/v1/chat/completions"' in line and 'status="200"' in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    before = count()
    server.post("/v1/chat/completions", CHAT)
    assert count() == before + 1


def test_the_page(server):
    reply = server.get("/")
    assert reply.status_code == 200 and "text/html" in reply.headers["content-type"]


def test_what_needs_a_key(guarded, conforms):
    for path, item in guarded.get("/openapi.json").json()["paths"].items():
        for method, operation in item.items():
            path = path.replace("{id}", "tiny")
            reply = requests.request(method, guarded.url + path, json={}, timeout=60)
            public = operation.get("security") == []
            assert (reply.status_code != 401) == public, f"{method} {path}: {reply.status_code}"
            if not public:
                described = operation["responses"]["401"]["content"]["application/json"]["schema"]["$ref"]
                conforms(described.split("/")[-1], reply.json())
                assert reply.headers["www-authenticate"] == "Bearer"
            for header in [{"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}]:
                assert requests.request(method, guarded.url + path, json={}, headers=header, timeout=60).status_code != 401


@pytest.mark.parametrize(
    ("body", "status"),
    [(b"", 400), (b"{", 400), (b"[]", 400), (b"\xff", 400), (b'{"a": NaN}', 400), (b'{"n":1,"n":2}', 400)],
    ids=str,
)
def test_bodies_that_are_no_json(server, conforms, body, status):
    reply = requests.post(server.url + "/v1/chat/completions", data=body, headers={"content-type": "application/json"}, timeout=60)
    assert reply.status_code == status
    conforms("Error", reply.json())
