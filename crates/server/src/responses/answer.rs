//! Answers of `/v1/responses`, in one body or as a stream of events.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::input::{Shown, assistant_message, call};
use super::store::Stored;
use super::tools::Namespaces;
use super::types::{ResponseBody, ResponseUsage, Status, error_detail};
use crate::app::App;
use crate::choice::{AnswerToken, Finish};
use crate::endpoint::Answer;
use crate::error::ApiError;
use crate::generation::{Generation, Update};
use crate::logprobs::ChatLogprobs;
use crate::parts::{Part, PartKind, PartNews, Parts};
use crate::random::random_id;
use crate::sse::Events;
use crate::types::unix_seconds;

/// Makes the answer: as a stream `response.created`, items one after the other, `response.completed`.
pub(crate) struct ResponseAnswer {
    pub(super) app: Arc<App>,
    pub(super) id: String,
    pub(super) model: String,
    pub(super) created_unix_s: u64,
    pub(super) echo: Map<String, Value>,
    pub(super) shown: Shown,
    pub(super) namespaces: Namespaces,
    /// Whether tokens of the text come with log-probabilities.
    pub(super) logprobs: bool,
    /// What is kept with the response, if it is.
    pub(super) keep: Option<Keep>,
    pub(super) parts: Parts,
    /// Ids of the items, one for each part.
    pub(super) item_ids: Vec<String>,
    /// Tokens whose text is in the answer's text.
    pub(super) tokens: Vec<AnswerToken>,
    pub(super) finish: Option<Finish>,
    pub(super) sequence_number: usize,
}

/// What a later request needs to go on from a response.
pub(super) struct Keep {
    pub(super) owner: String,
    /// The items that were sent.
    pub(super) input: Value,
    /// The conversation before the response, without instructions.
    pub(super) history: Vec<Value>,
}

/// An event: its type, its number, and what it says.
#[derive(Serialize)]
struct Numbered<'a, T> {
    r#type: &'a str,
    sequence_number: usize,
    #[serde(flatten)]
    says: &'a T,
}

impl ResponseAnswer {
    fn send(&mut self, kind: &str, says: &impl Serialize, events: &mut Events) {
        let sequence_number = self.sequence_number;
        self.sequence_number += 1;
        events.named(kind, &Numbered { r#type: kind, sequence_number, says });
    }

    fn send_response(&mut self, kind: &str, status: Status, generation: &Generation, events: &mut Events) {
        let response = json!({"response": self.body(status, Some(generation), None)});
        self.send(kind, &response, events);
    }

    fn tell(&mut self, index: usize, news: PartNews, events: &mut Events) {
        match news {
            PartNews::Begun => self.begin_item(index, events),
            PartNews::More(text) => {
                let (kind, place) = match self.parts.all()[index].kind {
                    PartKind::Reasoning => self.reasoning_place("delta"),
                    PartKind::Text => ("response.output_text.delta", "content_index"),
                    PartKind::Call(_) => ("response.function_call_arguments.delta", ""),
                };
                let mut says = self.place(index, place);
                says.insert("delta".into(), text.into());
                if kind == "response.output_text.delta" {
                    says.insert("logprobs".into(), json!([]));
                }
                self.send(kind, &says, events);
            }
            PartNews::Ended => self.end_item(index, events),
        }
    }

    /// The type of an event about thinking, and what its part's number is called.
    fn reasoning_place(&self, what: &str) -> (&'static str, &'static str) {
        match (self.shown, what) {
            (Shown::Text, "delta") => ("response.reasoning_text.delta", "content_index"),
            (Shown::Text, _) => ("response.reasoning_text.done", "content_index"),
            (Shown::Summary, "delta") => ("response.reasoning_summary_text.delta", "summary_index"),
            (Shown::Summary, _) => ("response.reasoning_summary_text.done", "summary_index"),
        }
    }

    /// Where in the response something happens. Every item with parts has one part.
    fn place(&self, index: usize, part: &str) -> Map<String, Value> {
        let mut place = Map::new();
        place.insert("item_id".into(), self.item_ids[index].clone().into());
        place.insert("output_index".into(), index.into());
        if !part.is_empty() {
            place.insert(part.into(), 0.into());
        }
        place
    }

    fn begin_item(&mut self, index: usize, events: &mut Events) {
        let kind = &self.parts.all()[index].kind;
        self.item_ids.push(random_id(match kind {
            PartKind::Reasoning => "rs_",
            PartKind::Text => "msg_",
            PartKind::Call(_) => "fc_",
        }));
        let part = self.part_of(kind, "");
        let item = self.item(index, Status::InProgress, "");
        self.send("response.output_item.added", &json!({"output_index": index, "item": item}), events);
        if let Some((kind, place, part)) = part {
            let mut says = self.place(index, place);
            says.insert("part".into(), part);
            self.send(&format!("{kind}.added"), &says, events);
        }
    }

    fn end_item(&mut self, index: usize, events: &mut Events) {
        let Part { kind, text } = self.parts.all()[index].clone();
        let (event, place, field) = match &kind {
            PartKind::Reasoning => {
                let (event, place) = self.reasoning_place("done");
                (event, place, "text")
            }
            PartKind::Text => ("response.output_text.done", "content_index", "text"),
            PartKind::Call(_) => ("response.function_call_arguments.done", "", "arguments"),
        };
        let mut says = self.place(index, place);
        says.insert(field.into(), text.clone().into());
        match &kind {
            PartKind::Text => drop(says.insert("logprobs".into(), self.logprobs())),
            PartKind::Call(begin) => {
                drop(says.insert("name".into(), self.namespaces.split(&begin.name).1.into()));
            }
            PartKind::Reasoning => {}
        }
        self.send(event, &says, events);
        if let Some((kind, place, part)) = self.part_of(&kind, &text) {
            let mut says = self.place(index, place);
            says.insert("part".into(), part);
            self.send(&format!("{kind}.done"), &says, events);
        }
        let item = self.item(index, self.item_status(index), &text);
        self.send("response.output_item.done", &json!({"output_index": index, "item": item}), events);
    }

    /// The one part of an item: what its events are called, what its number is called, and the part.
    fn part_of(&self, kind: &PartKind, text: &str) -> Option<(&'static str, &'static str, Value)> {
        const CONTENT: (&str, &str) = ("response.content_part", "content_index");
        const SUMMARY: (&str, &str) = ("response.reasoning_summary_part", "summary_index");
        let (names, part) = match (kind, self.shown) {
            (PartKind::Call(_), _) => return None,
            (PartKind::Text, _) => (CONTENT, self.output_text(text)),
            (PartKind::Reasoning, Shown::Text) => (CONTENT, json!({"type": "reasoning_text", "text": text})),
            (PartKind::Reasoning, Shown::Summary) => (SUMMARY, json!({"type": "summary_text", "text": text})),
        };
        Some((names.0, names.1, part))
    }

    fn output_text(&self, text: &str) -> Value {
        let logprobs = if text.is_empty() { json!([]) } else { self.logprobs() };
        json!({"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs})
    }

    fn logprobs(&self) -> Value {
        if !self.logprobs {
            return json!([]);
        }
        let logprobs = ChatLogprobs::new(&self.app.text.tokenizer, &self.tokens);
        serde_json::to_value(logprobs.content).unwrap_or_default()
    }

    /// The last item is cut short when the answer is.
    fn item_status(&self, index: usize) -> Status {
        let last = index + 1 == self.parts.all().len();
        self.finish.filter(|_| last).map_or(Status::Completed, Status::after)
    }

    /// The item of a part with this much text; its content is empty before there is any.
    fn item(&self, index: usize, status: Status, text: &str) -> Value {
        let part = &self.parts.all()[index];
        let begun = status == Status::InProgress;
        let content: Vec<Value> = if begun {
            Vec::new()
        } else {
            self.part_of(&part.kind, text).into_iter().map(|(_, _, part)| part).collect()
        };
        let id = &self.item_ids[index];
        match (&part.kind, self.shown) {
            (PartKind::Reasoning, Shown::Text) => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": [], "content": content})
            }
            (PartKind::Reasoning, Shown::Summary) => {
                json!({"id": id, "type": "reasoning", "status": status, "summary": content})
            }
            (PartKind::Text, _) => {
                json!({"id": id, "type": "message", "status": status, "role": "assistant", "content": content})
            }
            (PartKind::Call(begin), _) => {
                let (namespace, name) = self.namespaces.split(&begin.name);
                let mut item = json!({
                    "id": id, "type": "function_call", "status": status, "call_id": begin.id, "name": name,
                    "arguments": text,
                });
                if let Some(namespace) = namespace {
                    item["namespace"] = namespace.into();
                }
                item
            }
        }
    }

    fn body(
        &self,
        status: Status,
        generation: Option<&Generation>,
        error: Option<&ApiError>,
    ) -> ResponseBody<'_> {
        let over = status != Status::InProgress;
        let items = self.parts.all().iter().enumerate();
        let last = self.parts.all().len().saturating_sub(1);
        let status_of = |index| match status {
            Status::Failed if index == last => Status::Incomplete,
            _ => self.item_status(index),
        };
        let output = items.map(|(index, part)| self.item(index, status_of(index), &part.text));
        let usage = generation.filter(|_| over).map(|generation| ResponseUsage::from(generation.usage()));
        let reason = json!({"reason": "max_output_tokens"});
        ResponseBody {
            id: &self.id,
            object: "response",
            created_at: self.created_unix_s,
            completed_at: (status == Status::Completed).then(unix_seconds),
            status,
            error: error.map(error_detail),
            incomplete_details: (status == Status::Incomplete).then_some(reason),
            model: &self.model,
            output: output.collect(),
            usage,
            echo: &self.echo,
        }
    }

    fn status(&self) -> Status {
        self.finish.map_or(Status::Completed, Status::after)
    }

    /// Keeps what was answered, where the request did not ask otherwise.
    fn keep(&mut self, generation: &Generation) {
        let Some(Keep { owner, input, mut history }) = self.keep.take() else { return };
        history.push(self.as_message());
        let text = |value: &Value| value.to_string();
        let body = serde_json::to_value(self.body(self.status(), Some(generation), None)).unwrap_or_default();
        let stored = Stored { owner, body: text(&body), input: text(&input), history: text(&history.into()) };
        self.app.responses.keep(self.id.clone(), stored);
    }

    /// The answer as a message of the conversation.
    fn as_message(&self) -> Value {
        let mut reasoning = String::new();
        let mut content = String::new();
        let mut calls = Vec::new();
        for part in self.parts.all() {
            match &part.kind {
                PartKind::Reasoning => reasoning.push_str(&part.text),
                PartKind::Text => content.push_str(&part.text),
                PartKind::Call(begin) => {
                    calls.push(call(&begin.id, &begin.name, part.arguments()));
                }
            }
        }
        assistant_message(reasoning, content.into(), calls)
    }
}

impl Answer for ResponseAnswer {
    type Body = Value;

    fn begin(&mut self, generation: &Generation, events: &mut Events) {
        self.send_response("response.created", Status::InProgress, generation, events);
        self.send_response("response.in_progress", Status::InProgress, generation, events);
    }

    fn update(&mut self, _generation: &Generation, update: Update, events: &mut Events) {
        let news = match update {
            Update::Started { .. } | Update::Progress { .. } | Update::PromptLogprobs { .. } => return,
            Update::Delta { mut delta, .. } => {
                if self.logprobs {
                    let tokens = std::mem::take(&mut delta.tokens);
                    self.tokens.extend(tokens.into_iter().filter(|token| !token.thinking));
                }
                self.parts.take(delta)
            }
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
        self.keep(generation);
        let status = self.status();
        let kind = if status == Status::Incomplete { "response.incomplete" } else { "response.completed" };
        self.send_response(kind, status, generation, events);
    }

    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        let response = json!({"response": self.body(Status::Failed, None, Some(error))});
        self.send("response.failed", &response, events);
    }

    async fn collect(mut self, mut generation: Generation) -> Result<Value, ApiError> {
        while let Some(update) = generation.next().await {
            self.update(&generation, update?, &mut Events::default());
        }
        self.keep(&generation);
        let body = self.body(self.status(), Some(&generation), None);
        serde_json::to_value(body).map_err(|error| ApiError::internal(error.to_string()))
    }
}
