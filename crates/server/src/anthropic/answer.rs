//! Answers of `/v1/messages`, in one body or as a stream of events.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::error::error_body;
use crate::choice::Finish;
use crate::endpoint::Answer;
use crate::error::ApiError;
use crate::generation::{Generation, Update};
use crate::parts::{Part, PartKind, PartNews, Parts};
use crate::sse::{Events, KeepAliveForm};

/// Clients that drop thinking without a signature send this one back; nobody checks it.
const SIGNATURE: &str = "qwill";

/// A message, whole or as it is before its first block.
#[derive(Serialize)]
pub(crate) struct MessageBody {
    id: String,
    r#type: &'static str,
    role: &'static str,
    model: String,
    content: Vec<Value>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
    usage: MessageUsage,
}

/// Token counts in Anthropic's way: what was found in the cache is not input.
#[derive(Debug, Clone, Copy, Serialize)]
#[expect(clippy::struct_field_names, reason = "the API's own names")]
struct MessageUsage {
    input_tokens: usize,
    cache_creation_input_tokens: usize,
    cache_read_input_tokens: usize,
    output_tokens: usize,
}

impl MessageUsage {
    fn of(generation: &Generation) -> Self {
        let usage = generation.usage();
        let cached = usage.prompt_tokens_details.cached_tokens;
        Self {
            input_tokens: usage.prompt_tokens - cached,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
        }
    }
}

/// Makes the answer: as a stream `message_start`, blocks one after the other, `message_delta`, `message_stop`.
pub(crate) struct MessageAnswer {
    id: String,
    model: String,
    parts: Parts,
    finish: Option<Finish>,
    started: bool,
}

impl MessageAnswer {
    pub(super) fn new(id: String, model: String) -> Self {
        Self { id, model, parts: Parts::default(), finish: None, started: false }
    }

    /// Before the first block, once it is known how much of the prompt was cached.
    fn start(&mut self, generation: &Generation, events: &mut Events) {
        if !std::mem::replace(&mut self.started, true) {
            let message = self.body(generation, Vec::new());
            events.named("message_start", &json!({"type": "message_start", "message": message}));
            events.named("ping", &json!({"type": "ping"}));
        }
    }

    fn tell(&self, index: usize, news: PartNews, events: &mut Events) {
        let part = &self.parts.all()[index];
        match news {
            PartNews::Begun => {
                let block = block(part, "", &Value::Object(Map::new()));
                let event = json!({"type": "content_block_start", "index": index, "content_block": block});
                events.named("content_block_start", &event);
            }
            PartNews::More(text) => {
                let delta = match part.kind {
                    PartKind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                    PartKind::Text => json!({"type": "text_delta", "text": text}),
                    PartKind::Call(_) => json!({"type": "input_json_delta", "partial_json": text}),
                };
                block_delta(index, &delta, events);
            }
            PartNews::Ended => {
                if part.kind == PartKind::Reasoning {
                    let delta = json!({"type": "signature_delta", "signature": SIGNATURE});
                    block_delta(index, &delta, events);
                }
                events.named("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
            }
        }
    }

    fn stop_reason(&self, generation: &Generation) -> Option<&'static str> {
        Some(match self.finish? {
            Finish::Length => "max_tokens",
            Finish::ToolCalls => "tool_use",
            Finish::Stop if generation.matched_stop(0).is_some() => "stop_sequence",
            // However the call came about, its result is waited for.
            Finish::Stop if self.parts.has_calls() => "tool_use",
            Finish::Stop => "end_turn",
        })
    }

    fn body(&self, generation: &Generation, content: Vec<Value>) -> MessageBody {
        MessageBody {
            id: self.id.clone(),
            r#type: "message",
            role: "assistant",
            model: self.model.clone(),
            content,
            stop_reason: self.stop_reason(generation),
            stop_sequence: generation.matched_stop(0).map(str::to_owned),
            usage: MessageUsage::of(generation),
        }
    }
}

impl Answer for MessageAnswer {
    type Body = MessageBody;

    fn update(&mut self, generation: &Generation, update: Update, events: &mut Events) {
        self.start(generation, events);
        let news = match update {
            Update::Started { .. } | Update::Progress { .. } | Update::PromptLogprobs { .. } => return,
            Update::Delta { delta, .. } => self.parts.take(delta),
            Update::Finished { finish, .. } => {
                self.finish = Some(finish);
                self.parts.finish()
            }
        };
        for (index, news) in news {
            self.tell(index, news, events);
        }
    }

    fn end(&mut self, generation: &Generation, events: &mut Events) {
        let stop_sequence = generation.matched_stop(0);
        let delta = json!({"stop_reason": self.stop_reason(generation), "stop_sequence": stop_sequence});
        let usage = MessageUsage::of(generation);
        events.named("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        events.named("message_stop", &json!({"type": "message_stop"}));
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &error_body(error, None));
    }

    fn keep_alive() -> KeepAliveForm {
        KeepAliveForm::Event { name: "ping", data: r#"{"type":"ping"}"# }
    }

    async fn collect(mut self, mut generation: Generation) -> Result<MessageBody, ApiError> {
        while let Some(update) = generation.next().await {
            self.update(&generation, update?, &mut Events::default());
        }
        let whole = |part: &Part| block(part, &part.text, &part.arguments());
        let content = self.parts.all().iter().map(whole).collect();
        Ok(self.body(&generation, content))
    }
}

/// A content block with this text, or for a call with this input.
fn block(part: &Part, text: &str, input: &Value) -> Value {
    match &part.kind {
        PartKind::Reasoning => {
            let signature = if text.is_empty() { "" } else { SIGNATURE };
            json!({"type": "thinking", "thinking": text, "signature": signature})
        }
        PartKind::Text => json!({"type": "text", "text": text}),
        PartKind::Call(begin) => {
            json!({"type": "tool_use", "id": begin.id, "name": begin.name, "input": input})
        }
    }
}

fn block_delta(index: usize, delta: &Value, events: &mut Events) {
    let event = json!({"type": "content_block_delta", "index": index, "delta": delta});
    events.named("content_block_delta", &event);
}
