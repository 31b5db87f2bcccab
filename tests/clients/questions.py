"""What the small model answers surely, from the golden outputs of the repository."""

import json
from pathlib import Path

GOLDEN = Path(__file__).resolve().parents[2] / "golden/behaviour.jsonl"
ROWS = [json.loads(line) for line in GOLDEN.read_text().splitlines()]
QUIET = {"chat_template_kwargs": {"enable_thinking": False}}


def user(text):
    return [{"role": "user", "content": text}]


def parts(row):
    """Thinking and answer of a golden row, as a client sees them."""
    answer = row["answer"].removesuffix("<|im_end|>")
    if not row["enable_thinking"]:
        return "", answer
    thinking, found, answer = answer.partition("</think>")
    return thinking.rstrip(), answer.lstrip() if found else ""


def request(row):
    """Arguments of the `openai` client that get a golden row's answer."""
    return {
        "messages": user(row["question"]),
        "temperature": 0,
        "max_tokens": len(row["ids"]),
        "extra_body": {"chat_template_kwargs": {"enable_thinking": row["enable_thinking"]}},
    }


DENMARK = next(row for row in ROWS if "Denmark" in row["question"] and not row["enable_thinking"])
SUM = next(row for row in ROWS if "310" in row["question"] and row["enable_thinking"])
