//! `POST /tokenize` and `POST /detokenize`.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::HeaderMap;
use qwill_text::{Markers, Tokenizer};
use serde::Serialize;
use serde_json::Value;

use crate::app::App;
use crate::body::read_object;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;
use crate::logprobs::label;
use crate::messages::take_messages;
use crate::params::parse_token_ids;
use crate::prompt::{Conversation, context_limit, encode_chat, prepare, take_ending, take_template_kwargs};
use crate::tools::take_tools;

#[derive(Serialize)]
pub(crate) struct TokenizeBody {
    count: usize,
    max_model_len: usize,
    tokens: Vec<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_strs: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pieces: Option<Vec<TokenPiece>>,
}

/// A token with its text, or its bytes when they are no text alone.
#[derive(Serialize)]
struct TokenPiece {
    id: u32,
    piece: Text,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Text {
    Characters(String),
    Bytes(Vec<u8>),
}

impl TokenPiece {
    fn new(tokenizer: &Tokenizer, id: u32) -> Self {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default().to_vec();
        let piece = match String::from_utf8(bytes) {
            Ok(text) => Text::Characters(text),
            Err(error) => Text::Bytes(error.into_bytes()),
        };
        Self { id, piece }
    }
}

/// Tokens of a text, as `/v1/completions` would read it, or of a conversation, as `/v1/chat/completions` would.
pub(crate) async fn tokenize(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<TokenizeBody>, ApiError> {
    let mut fields = Fields::new(read_object(&app.options, &headers, body).await?);
    let asked = fields.string("model")?;
    app.check_model(asked)?;
    let with_pieces = fields.boolean("with_pieces")?.unwrap_or(false);
    let with_strings = fields.boolean("return_token_strs")?.unwrap_or(false);
    // This family's tokenizers add nothing at either end.
    fields.boolean("add_special")?;
    fields.boolean("add_special_tokens")?;
    let tokens = match take_text(&mut fields)? {
        Some(text) => {
            let parse_markers = fields.boolean("parse_special")?.unwrap_or(true);
            known::settle(&app, &fields)?;
            let tokenizer = Arc::clone(&app.text.tokenizer);
            let markers = if parse_markers { Markers::All } else { Markers::None };
            prepare(&app, move || Ok(tokenizer.encode(&text, markers))).await?
        }
        None => tokenize_chat(&app, fields).await?,
    };
    let tokenizer = &app.text.tokenizer;
    Ok(Json(TokenizeBody {
        count: tokens.len(),
        max_model_len: context_limit(app.facts(), 1),
        token_strs: with_strings.then(|| tokens.iter().map(|&id| label(tokenizer, id)).collect()),
        pieces: with_pieces.then(|| tokens.iter().map(|&id| TokenPiece::new(tokenizer, id)).collect()),
        tokens,
    }))
}

/// The text under either of its names.
fn take_text(fields: &mut Fields) -> Result<Option<String>, ApiError> {
    let prompt = fields.string("prompt")?;
    let content = fields.string("content")?;
    let given = [prompt.is_some(), content.is_some(), fields.has("messages")];
    match given.into_iter().filter(|&given| given).count() {
        1 => Ok(prompt.or(content)),
        0 => Err(ApiError::field("prompt", "one of `prompt`, `content` or `messages` is needed")),
        _ => Err(ApiError::field("prompt", "only one of `prompt`, `content` and `messages` can be given")),
    }
}

async fn tokenize_chat(app: &App, mut fields: Fields) -> Result<Vec<u32>, ApiError> {
    let messages = take_messages(app, &mut fields)?;
    let tools = take_tools(&mut fields)?;
    let kwargs = take_template_kwargs(app, &mut fields)?;
    let ending = take_ending(&mut fields, &messages)?;
    known::settle(app, &fields)?;
    let conversation = Conversation { messages, tools: tools.definitions(), ending, kwargs };
    Ok(encode_chat(app, conversation).await?.ids)
}

/// The text under the names that clients of either kind look for.
#[derive(Serialize)]
pub(crate) struct DetokenizeBody {
    prompt: String,
    text: String,
}

/// Text of tokens, markers included unless `skip_special_tokens`.
pub(crate) async fn detokenize(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<DetokenizeBody>, ApiError> {
    let mut fields = Fields::new(read_object(&app.options, &headers, body).await?);
    let asked = fields.string("model")?;
    app.check_model(asked)?;
    let tokens: Vec<Value> = fields
        .list("tokens")?
        .ok_or_else(|| ApiError::field("tokens", "`tokens` is missing: a list of token ids"))?;
    let ids = parse_token_ids(&tokens, "tokens", app.facts().vocab_size)?;
    let skip_special = fields.boolean("skip_special_tokens")?.unwrap_or(false);
    known::settle(&app, &fields)?;
    let tokenizer = Arc::clone(&app.text.tokenizer);
    let text = prepare(&app, move || Ok(tokenizer.decode(&ids, skip_special))).await?;
    Ok(Json(DetokenizeBody { prompt: text.clone(), text }))
}
