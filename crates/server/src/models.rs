//! `GET /v1/models` and `GET /v1/models/{id}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;

use crate::app::App;
use crate::error::ApiError;
use crate::prompt::context_limit;

/// A model under one of its names. The context length has the two names that clients look for.
#[derive(Serialize)]
pub(crate) struct Model {
    id: String,
    object: &'static str,
    /// Seconds since 1970.
    created: u64,
    owned_by: &'static str,
    max_model_len: usize,
    context_length: usize,
}

#[derive(Serialize)]
pub(crate) struct ModelList {
    object: &'static str,
    data: Vec<Model>,
    /// A coding agent reads its own descriptions of models here, with the instructions it is to work by. Without one it takes
    /// what it has built in; without the list it complains.
    models: [(); 0],
}

fn model(app: &App, name: &str) -> Model {
    let context_length = context_limit(app.facts(), 1);
    Model {
        id: name.to_owned(),
        object: "model",
        created: app.started_unix_s,
        owned_by: "qwill",
        max_model_len: context_length,
        context_length,
    }
}

/// All names of the model.
pub(crate) async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    let data = app.facts().model_names.iter().map(|name| model(&app, name)).collect();
    Json(ModelList { object: "list", data, models: [] })
}

/// One of them; names may contain slashes.
pub(crate) async fn one(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(name) = name.map_err(|_| {
        let message = "the model's name in the path must be percent-encoded UTF-8";
        ApiError::field("model", message).with_code("invalid_value")
    })?;
    app.check_own_model(&name)?;
    Ok(Json(model(&app, &name)))
}
