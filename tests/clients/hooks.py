"""What schemathesis needs to know of this server."""

import re

import schemathesis

LONGEST = 4

# Rules that tie fields to each other, to the model's vocabulary or to the length of the context: a schema cannot say
# them, so a body that is valid by the schema may be refused for them, with this field named.
RELATIONS = [
    r"(max_tokens|max_completion_tokens|max_output_tokens|min_tokens|n)$",
    r"best_of$",
    r"(stream_options|return_progress|prompt_logprobs)$",
    r"top_logprobs$",
    r"(prompt|tokens|stop_token_ids|allowed_token_ids)(\[\d+\])*$",
    r"logit_bias",
    r"messages(\[\d+\]\.(tool_calls\[\d+\]\.function|function_call)\.arguments)?$",
    r"chat_template_kwargs$",
    r"tool_choice",
    r"function(s|_call)",
    r"tools(\[\d+\](\.function)?\.(name|parameters))?$",
    r"(stop|stop_sequences)(\[\d+\])?$",
    r"cache_salt$",
    # One form of an answer, and one that can be compiled.
    r"(response_format|structured_outputs|guided_|json_schema$|regex$|grammar$|ebnf$)",
    r"rid$",
    # What an item or a block needs depends on its type.
    r"input\[\d+\]",
    r"messages\[\d+\]\.content\[\d+\]",
    r"(system|thinking|output_config|output_format|text\.format)",
    r"include",
    # Above zero as the 32 bits that they are used as.
    r"(top_p|repetition_penalty|max_time_s)$",
]


@schemathesis.hook
def map_body(context, body):
    """Keeps answers short: the server is tried, not the model."""
    if isinstance(body, dict):
        for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
            asked = body.get(name)
            if isinstance(asked, int) and not isinstance(asked, bool) and asked > LONGEST:
                body[name] = LONGEST
    return body


@schemathesis.check
def refused_only_for_what_no_schema_can_say(ctx, response, case):
    """In place of `positive_data_acceptance`, which knows the status alone."""
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code != 400:
        return
    error = response.json()["error"]
    # Anthropic's errors have no place for the field but the message.
    named = error.get("param") or "".join(re.findall(r"`([^`]+)`", error["message"])[:1])
    assert any(re.match(rule, named) for rule in RELATIONS), f"a valid request was refused: {error}"
