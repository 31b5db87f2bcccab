//! What was kept of earlier responses.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Extension, Path, State};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::{Value, json};

use super::find;
use crate::app::App;
use crate::auth::Origin;
use crate::error::ApiError;

/// `GET /v1/responses/{id}`.
pub(crate) async fn show(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    Path(id): Path<String>,
) -> Result<Response, ApiError> {
    let body = find(&app, &origin.caller.name, &id)?.body.clone();
    Ok(([(header::CONTENT_TYPE, "application/json")], body).into_response())
}

#[derive(Serialize)]
pub(crate) struct Removed {
    id: String,
    object: &'static str,
    deleted: bool,
}

/// `DELETE /v1/responses/{id}`.
pub(crate) async fn remove(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    Path(id): Path<String>,
) -> Result<Json<Removed>, ApiError> {
    find(&app, &origin.caller.name, &id)?;
    app.responses.remove(&id);
    Ok(Json(Removed { id, object: "response", deleted: true }))
}

#[derive(Serialize)]
pub(crate) struct ItemList {
    object: &'static str,
    data: Vec<Value>,
    first_id: Option<Value>,
    last_id: Option<Value>,
    has_more: bool,
}

/// `GET /v1/responses/{id}/input_items`, all of them, the last one first.
pub(crate) async fn input_items(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    Path(id): Path<String>,
) -> Result<Json<ItemList>, ApiError> {
    let stored = find(&app, &origin.caller.name, &id)?;
    let input = serde_json::from_str(&stored.input).map_err(|error| ApiError::internal(error.to_string()))?;
    let mut data = match input {
        Value::Array(items) => items,
        text => vec![json!({"role": "user", "content": [{"type": "input_text", "text": text}]})],
    };
    for (index, item) in data.iter_mut().enumerate() {
        complete(&id, index, item);
    }
    data.reverse();
    let id_of = |item: Option<&Value>| item.and_then(|item| item.get("id")).cloned();
    let (first_id, last_id) = (id_of(data.first()), id_of(data.last()));
    Ok(Json(ItemList { object: "list", data, first_id, last_id, has_more: false }))
}

/// Adds what a client may leave out.
fn complete(response_id: &str, index: usize, item: &mut Value) {
    let Value::Object(fields) = item else { return };
    fields.entry("type").or_insert_with(|| "message".into());
    fields.entry("id").or_insert_with(|| format!("item_{index}_of_{response_id}").into());
    if let Some(text) = fields.get("content").and_then(Value::as_str).map(str::to_owned) {
        fields.insert("content".into(), json!([{"type": "input_text", "text": text}]));
    }
}
