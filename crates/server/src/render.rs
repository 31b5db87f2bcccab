//! What a conversation looks like to the model, without running it: text, tokens, and how many.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use serde::Serialize;

use crate::app::App;
use crate::auth::Origin;
use crate::body::read_object;
use crate::chat::ChatRequest;
use crate::endpoint::Endpoint;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::prompt::{Conversation, Encoded, context_limit, encode_chat};

/// An endpoint that answers conversations.
pub(crate) trait Converses: Endpoint {
    fn into_conversation(self) -> Conversation;
}

#[derive(Serialize)]
pub(crate) struct RenderedBody {
    prompt: String,
    prompt_token_ids: Vec<u32>,
    count: usize,
    max_model_len: usize,
    /// Whether the answer begins inside a thinking section.
    opens_reasoning: bool,
}

/// Text and tokens of a chat's prompt.
pub(crate) async fn render(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<RenderedBody>, ApiError> {
    let encoded = encode::<ChatRequest>(&app, &origin, &headers, body).await?;
    Ok(Json(RenderedBody {
        prompt: encoded.text,
        count: encoded.ids.len(),
        prompt_token_ids: encoded.ids,
        max_model_len: context_limit(app.facts(), 1),
        opens_reasoning: encoded.opens_reasoning,
    }))
}

#[derive(Serialize)]
pub(crate) struct AppliedTemplate {
    prompt: String,
}

/// The text alone.
pub(crate) async fn apply_template(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<AppliedTemplate>, ApiError> {
    let encoded = encode::<ChatRequest>(&app, &origin, &headers, body).await?;
    Ok(Json(AppliedTemplate { prompt: encoded.text }))
}

#[derive(Serialize)]
pub(crate) struct InputTokens {
    object: &'static str,
    input_tokens: usize,
}

/// How many tokens the prompt of a request has.
pub(crate) async fn input_tokens<E: Converses>(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<InputTokens>, ApiError> {
    let input_tokens = encode::<E>(&app, &origin, &headers, body).await?.ids.len();
    Ok(Json(InputTokens { object: "response.input_tokens", input_tokens }))
}

/// Reads a request as its endpoint does, and its prompt as the model does.
pub(crate) async fn encode<E: Converses>(
    app: &Arc<App>,
    origin: &Origin,
    headers: &HeaderMap,
    body: Body,
) -> Result<Encoded, ApiError> {
    let fields = read_object(&app.options, headers, body).await?;
    let request = E::parse(app, &origin.caller.name, Fields::new(fields))?;
    encode_chat(app, request.into_conversation()).await
}
