"""A server with the small model, and clients for it."""

import json
import os
import subprocess
import threading
from pathlib import Path

import anthropic
import openai
import pytest
import requests

REPOSITORY = Path(__file__).resolve().parents[2]
PATIENCE_S = 120
KEY = "sk-clients-suite"


class Server:
    """A process of `qwill serve`, on the processor, with the model inside the binary."""

    def __init__(self, *arguments):
        binary = os.environ.get("QWILL_BINARY", REPOSITORY / "target/debug/qwill")
        environment = {name: value for name, value in os.environ.items() if not name.startswith("QWILL_")}
        environment |= {"QWILL_DEVICE": "cpu", "NO_COLOR": "1"}
        command = [binary, "serve", "--port", "0", "--max-sequences", "4", "--thinking", "true", *arguments]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.log = []
        threading.Thread(target=self._keep_log, daemon=True).start()
        watchdog = threading.Timer(PATIENCE_S, self.process.kill)
        watchdog.start()
        self.url = self._ready()
        watchdog.cancel()

    def _keep_log(self):
        self.log.extend(self.process.stderr)

    def _ready(self):
        """The screen ends with a command to copy; before it there is the metrics' address."""
        screen, url = "", None
        for line in self.process.stdout:
            screen += line
            if line.startswith("metrics"):
                url = line.split()[-1].removesuffix("/metrics")
            if "\ncurl " in screen and line == "\n":
                return url
        raise RuntimeError(f"the server did not start:\n{screen}\n{''.join(self.log)}")

    def stop(self):
        self.process.terminate()
        assert self.process.wait(PATIENCE_S) == 0, "".join(self.log)

    def get(self, path, **more):
        return requests.get(self.url + path, timeout=PATIENCE_S, **more)

    def post(self, path, body, **more):
        return requests.post(self.url + path, json=body, timeout=PATIENCE_S, **more)

    def events(self, path, body, **more):
        """Data of the events of a stream, each read as JSON; a last `[DONE]` stays text."""
        with self.post(path, body, stream=True, **more) as reply:
            assert reply.status_code == 200, reply.text
            lines = (line.decode() for line in reply.iter_lines() if line.startswith(b"data: "))
            return [text if (text := line[6:]) == "[DONE]" else json.loads(text) for line in lines]


def running(*arguments):
    server = Server(*arguments)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def server():
    """Open to everybody on this machine."""
    yield from running()


@pytest.fixture(scope="session")
def guarded():
    """Wants a key, refuses unknown fields."""
    yield from running("--api-key", KEY, "--strict-params")


@pytest.fixture(scope="session")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def aclient(server):
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def aclaude(server):
    async with anthropic.AsyncAnthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def model(client):
    return client.models.list().data[0].id


@pytest.fixture(scope="session")
def conforms(server):
    """A function that checks a value against a component of the document."""
    return Document(server.get("/openapi.json").json()).check


class Document:
    def __init__(self, document):
        self.document = document

    def check(self, component, value):
        """Everything documented must be there, and nothing must be there that is not documented."""
        import jsonschema

        schema = {"$ref": f"#/components/schemas/{component}", "components": self.document["components"]}
        jsonschema.Draft202012Validator(schema).validate(value)
        secret = self.undocumented({"$ref": schema["$ref"]}, value, component)
        assert not secret, f"not documented: {secret}"

    def undocumented(self, schema, value, path):
        """Paths of properties that no branch of the schema names."""
        branches = self.branches(schema)
        if isinstance(value, list):
            items = {"anyOf": [branch["items"] for branch in branches if "items" in branch]}
            return [] if not items["anyOf"] else [p for item in value for p in self.undocumented(items, item, path + "[]")]
        named = [branch["properties"] for branch in branches if "properties" in branch]
        if not isinstance(value, dict) or not named:
            return []
        found = []
        for name, inner in value.items():
            schemas = [properties[name] for properties in named if name in properties]
            found += self.undocumented({"anyOf": schemas}, inner, f"{path}.{name}") if schemas else [f"{path}.{name}"]
        return found

    def branches(self, schema):
        if "$ref" in schema:
            return self.branches(self.document["components"]["schemas"][schema["$ref"].split("/")[-1]])
        parts = schema.get("anyOf", []) + schema.get("oneOf", []) + schema.get("allOf", [])
        return [schema] + [branch for part in parts for branch in self.branches(part)]
