"""Load from many clients that chat, stream, complete and leave: `locust -f load.py --headless -H URL -u 16 -r 8 -t 60s`.

Locust is not among the suite's packages: install it by hand.
"""

import json
import random
import time

from locust import HttpUser, constant, events, task

WORDS = "river stone apple Denmark Copenhagen sum of 310 and 661 Python function string".split()


def chat(**more):
    text = " ".join(random.choices(WORDS, k=random.randint(4, 60)))
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 32, "enable_thinking": False} | more


class Client(HttpUser):
    wait_time = constant(0)

    @task(3)
    def answer(self):
        with self.client.post("/v1/chat/completions", json=chat(), catch_response=True) as reply:
            if reply.status_code == 200 and not reply.json()["choices"][0]["finish_reason"]:
                reply.failure("no finish reason")

    @task(5)
    def stream(self):
        started = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=chat(stream=True), stream=True, catch_response=True, name="chat, streamed"
        ) as reply:
            if reply.status_code != 200:
                return
            lines = [line for line in reply.iter_lines() if line.startswith(b"data: ")]
            if lines[-1] != b"data: [DONE]" or "error" in json.loads(lines[-2][6:]):
                reply.failure("the stream did not end in order")
        took_ms = (time.perf_counter() - started) * 1e3
        events.request.fire(
            request_type="SSE", name="whole stream", response_time=took_ms, response_length=len(lines), exception=None
        )

    @task(1)
    def leave(self):
        with self.client.post(
            "/v1/chat/completions", json=chat(stream=True, ignore_eos=True), stream=True, catch_response=True, name="left"
        ) as reply:
            next(reply.iter_lines(), None)
            reply.success()

    @task(1)
    def complete(self):
        self.client.post("/v1/completions", json={"prompt": random.choices(WORDS, k=3), "max_tokens": 8})
