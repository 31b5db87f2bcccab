"""Requests that are wrong in every way that a table can hold, and many at once. After each table the server is as before."""

import asyncio
import json

import jsonschema
import openai
import pytest
import requests
from questions import DENMARK, QUIET, parts, request, user

CHAT = {
    "model": "tiny",
    "messages": [{"role": "system", "content": "Be brief \u00e9."}, {"role": "user", "content": "Hi 🙂"}],
    "temperature": 0.5,
    "stop": ["a", "b"],
    "stream": False,
    "max_tokens": 1,
    "logit_bias": {"5": -1.5e1},
}
COMPLETION = {"model": "tiny", "prompt": ["One \\ \"two\"", "drei 日本"], "seed": -7, "echo": True, "n": 1, "max_tokens": 1, "user": None}
BASES = {
    "/v1/chat/completions": {"messages": user("Hi"), "max_tokens": 2, **QUIET},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [5]},
}
BAD_VALUES = [None, "", -1, 0, 1e308, [], {}, "NaN"]


@pytest.fixture(autouse=True)
def the_server_goes_on(server, client, model):
    """After each table: the golden answer, nothing running, nothing waiting."""
    yield
    assert client.chat.completions.create(model=model, **request(DENMARK)).choices[0].message.content == parts(DENMARK)[1]
    health = server.get("/health").json()
    assert (health["status"], health["running"], health["waiting"]) == ("ok", 0, 0)


def send(server, path, data, kind="application/json"):
    return requests.post(server.url + path, data=data, headers={"content-type": kind} if kind else {}, timeout=60)


def check_refusal(conforms, reply, *statuses):
    assert reply.status_code in statuses, reply.text
    conforms("Error", reply.json())


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_r1_bodies_cut_short(server, conforms, path, body):
    """100 cuts of each of two bodies."""
    whole = json.dumps(body, ensure_ascii=False).encode()
    assert send(server, path, whole).status_code in (200, 404)
    cuts = sorted({round(index * (len(whole) - 1) / 99) for index in range(100)})
    assert len(cuts) == 100
    for cut in cuts:
        check_refusal(conforms, send(server, path, whole[:cut]), 400)


@pytest.mark.parametrize("path", BASES)
def test_r1_bodies_that_are_no_json_object(server, conforms, path):
    body = json.dumps(BASES[path]).encode()
    wrong = [
        b"\xef\xbb\xbf" + body,
        body[:-1] + b', "temperature": NaN}',
        body[:-1] + b', "n": 1, "n": 1}',
        body[:-1] + b",}",
        b"/* hello */" + body,
        body + body,
        b"",
        b"[" + body + b"]",
        b'"text"',
        b"7",
        b"null",
    ]
    for data in wrong:
        check_refusal(conforms, send(server, path, data), 400)
    for kind in ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None]:
        check_refusal(conforms, send(server, path, body, kind), 415)


@pytest.mark.parametrize("path", BASES)
def test_r2_wrong_types_and_ranges(server, conforms, path):
    """Eight values for each documented field: what the document forbids is a 400 that names the field."""
    document = server.get("/openapi.json").json()
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    validator = jsonschema.Draft202012Validator(schema | {"components": document["components"]})
    for name in sorted({name for form in schema.get("anyOf", [schema]) for name in form["properties"]}):
        base = {key: kept for key, kept in BASES[path].items() if key != "prompt" or name not in {"messages", "content"}}
        for value in BAD_VALUES:
            body = base | {name: value}
            reply = server.post(path, body)
            context = f"{name}: {value!r}: {reply.text}"
            if reply.status_code == 200:
                assert validator.is_valid(body), f"accepted, but not documented: {context}"
            elif reply.status_code != 404 or name != "model":
                check_refusal(conforms, reply, 400)
                named = reply.json()["error"]["param"] or ""
                assert named.startswith(name) or name in reply.json()["error"]["message"], context


async def test_r8_many_short_requests_at_once(server, model):
    """512 at the same moment: none is lost or taken for one whose client has left. The queue's bound answers 429."""
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=200) as client:

        async def ask(index):
            reply = await client.completions.create(model=model, prompt=f"{index}", max_tokens=1, seed=index, timeout=300)
            return reply.usage.completion_tokens

        counts = await asyncio.gather(*(ask(index) for index in range(512)))
    assert counts == [1] * 512


@pytest.mark.parametrize(
    "text",
    [
        "你好".encode("gbk"),
        "你好".encode("gb18030"),
        "こんにちは".encode("shift_jis"),
        "привет".encode("koi8-r"),
        "café".encode("latin-1"),
        b"lone \x80",
        b"overlong \xc0\xaf",
        b"half \xed\xa0\x80",
        b"cut \xf0\x9f\x98",
        b"\\ud83d alone",
        b"\\ude42 alone",
        b"raw \x00 nul",
    ],
    ids=range(12),
)
def test_r11_text_that_is_no_utf_8(server, conforms, text):
    for path, before in [("/v1/chat/completions", b'{"messages":[{"role":"user","content":"'), ("/v1/completions", b'{"prompt":"')]:
        after = b'"}]}' if "chat" in path else b'"}'
        check_refusal(conforms, send(server, path, before + text + after), 400)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_r11_bodies_in_other_encodings(server, conforms, encoding):
    for path, body in BASES.items():
        check_refusal(conforms, send(server, path, json.dumps(body).encode(encoding)), 400)
