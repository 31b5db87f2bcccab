//! What touches work in hand: ending a request, emptying the prefix cache.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::{HeaderMap, StatusCode};
use serde::Serialize;
use tokio::time::{Instant, sleep};

use crate::app::App;
use crate::auth::Origin;
use crate::body::read_object;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::known;

/// How long a running step may keep the cache from being emptied.
const FLUSH_PATIENCE: Duration = Duration::from_secs(30);
const FLUSH_LOOK: Duration = Duration::from_millis(5);

#[derive(Serialize)]
pub(crate) struct Aborted {
    /// Ids of the answers.
    aborted: Vec<String>,
}

/// `POST /abort_request`: ends one request of the caller, or all of them; for the admin, of anybody.
pub(crate) async fn abort(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    headers: HeaderMap,
    body: Body,
) -> Result<Json<Aborted>, ApiError> {
    let mut fields = Fields::new(read_object(&app.options, &headers, body).await?);
    let names = [fields.string("rid")?, fields.string("request_id")?, fields.string("id")?];
    let id = names.into_iter().flatten().find(|id| !id.is_empty());
    let all = fields.boolean("abort_all")?.unwrap_or(false);
    known::settle(&app, &fields)?;
    if id.is_none() && !all {
        let message = "`rid` is missing: the id of an answer or of a request, or `abort_all`: true";
        return Err(ApiError::field("rid", message).with_code("invalid_value"));
    }
    let id = id.filter(|_| !all);
    let aborted = app.live.abort(&origin.caller, id.as_deref());
    if let Some(id) = id.filter(|_| aborted.is_empty()) {
        let shown: String = id.chars().take(80).collect();
        let message = format!("there is no request {shown:?} of yours in hand: it may have ended");
        let mut error = ApiError::new(StatusCode::NOT_FOUND, message).with_code("request_not_found");
        error.param = Some("rid".into());
        return Err(error);
    }
    tracing::info!(by = origin.caller.name, requests = aborted.join(" "), "requests aborted");
    Ok(Json(Aborted { aborted }))
}

#[derive(Serialize)]
pub(crate) struct Flushed {
    flushed: bool,
}

/// `POST /flush_cache`: forgets what prompts left in memory; what runs goes on.
pub(crate) async fn flush(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
) -> Result<Json<Flushed>, ApiError> {
    app.check_ready()?;
    let cache = &app.engine.load().cache;
    let flush = cache.request_flush();
    let deadline = Instant::now() + FLUSH_PATIENCE;
    while !cache.is_flushed(flush) {
        if Instant::now() > deadline {
            let message = "the engine has not come to empty its cache: its step takes too long";
            return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("busy").retry());
        }
        sleep(FLUSH_LOOK).await;
    }
    tracing::info!(by = origin.caller.name, "prefix cache emptied");
    Ok(Json(Flushed { flushed: true }))
}
