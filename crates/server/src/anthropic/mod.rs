//! Anthropic's API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

mod answer;
mod error;
mod input;

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use serde::Serialize;

use crate::app::App;
use crate::auth::Origin;
use crate::endpoint::Endpoint;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;
use crate::params::{Params, take_params};
use crate::prompt::{Conversation, Ending, Prompt, prepare_chat, take_template_kwargs};
use crate::render::{Converses, encode};

use answer::MessageAnswer;
pub(crate) use error::in_own_words;

/// A message to be answered, read and checked.
pub(crate) struct MessagesRequest {
    model: String,
    conversation: Conversation,
    params: Params,
}

impl Endpoint for MessagesRequest {
    const PATH: &'static str = "/v1/messages";
    const ID_PREFIX: &'static str = "msg_";
    type Answer = MessageAnswer;

    fn parse(app: &Arc<App>, _caller: &str, mut fields: Fields) -> Result<Self, ApiError> {
        let asked = fields.string("model")?;
        let model = app.check_model(asked)?;
        let messages = input::take_messages(app, &mut fields)?;
        let tools = input::take_tools(app, &mut fields)?;
        input::take_thinking(app, &mut fields)?;
        fields.rename("stop_sequences", "stop");
        let kwargs = take_template_kwargs(app, &mut fields)?;
        let mut params = take_params(app, &mut fields)?.single()?;
        if params.max_tokens == Some(0) {
            return Err(ApiError::value(&params.max_tokens_path, "at least 1", &0.into()));
        }
        known::settle(app, &fields)?;
        // What the assistant has begun to say it goes on with.
        let ending = Ending::after(&messages);
        let conversation = Conversation { messages, tools: tools.definitions(), ending, kwargs };
        params.tools = Arc::new(tools);
        Ok(Self { model, conversation, params })
    }

    fn model(&self) -> &str {
        &self.model
    }

    fn params(&self) -> &Params {
        &self.params
    }

    async fn prompts(&mut self, app: &Arc<App>) -> Result<Vec<Prompt>, ApiError> {
        prepare_chat(app, "messages", std::mem::take(&mut self.conversation), &self.params).await
    }

    fn answer(self, _app: &Arc<App>, id: String, _prompts: Vec<Prompt>) -> MessageAnswer {
        MessageAnswer::new(id, self.model)
    }
}

impl Converses for MessagesRequest {
    fn into_conversation(self) -> Conversation {
        self.conversation
    }
}

#[derive(Serialize)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

/// How many tokens the prompt of a message would have.
pub(crate) async fn count_tokens(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<TokenCount>, ApiError> {
    let input_tokens = encode::<MessagesRequest>(&app, &origin, &headers, body).await?.ids.len();
    Ok(Json(TokenCount { input_tokens }))
}
