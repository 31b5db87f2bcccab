//! What every endpoint that generates does in the same way: read and check the body, prepare prompts, start the
//! engine, answer in one body or as a stream, and record what became of it.

use std::future::Future;
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::{Extension, State};
use axum::http::HeaderMap;
use axum::response::{IntoResponse, Response};
use serde::Serialize;

use crate::app::App;
use crate::auth::Origin;
use crate::body::read_object;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::generation::{Generation, Update};
use crate::log::Record;
use crate::params::Params;
use crate::prompt::Prompt;
use crate::random::random_id;
use crate::sse::{self, Events, KeepAliveForm};

/// A request of one endpoint, read and checked.
pub(crate) trait Endpoint: Sized + Send {
    /// Its path, for the log and the metrics.
    const PATH: &'static str;
    /// What the ids of its answers begin with.
    const ID_PREFIX: &'static str;
    type Answer: Answer;

    /// Takes the request of `caller`, a holder of a key, out of a body.
    fn parse(app: &Arc<App>, caller: &str, fields: Fields) -> Result<Self, ApiError>;
    /// The model's name, as the client calls it.
    fn model(&self) -> &str;
    fn params(&self) -> &Params;
    /// Renders and tokenises what is to be continued.
    fn prompts(&mut self, app: &Arc<App>) -> impl Future<Output = Result<Vec<Prompt>, ApiError>> + Send;
    /// How the request is answered; `id` is the answer's.
    fn answer(self, app: &Arc<App>, id: String, prompts: Vec<Prompt>) -> Self::Answer;
}

/// Makes an answer out of a generation's news, as events or as one body that says the same.
pub(crate) trait Answer: Send + 'static {
    type Body: Serialize;

    /// Adds what comes before all news.
    fn begin(&mut self, _generation: &Generation, _events: &mut Events) {}
    /// Adds the events for `update`.
    fn update(&mut self, generation: &Generation, update: Update, events: &mut Events);
    /// Adds what comes after the last choice has finished.
    fn end(&mut self, generation: &Generation, events: &mut Events);
    /// Adds what tells of an error in a stream that has begun.
    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        events.data(&error.body());
        events.done();
    }
    /// What a stream sends while there is nothing to say.
    fn keep_alive() -> KeepAliveForm {
        KeepAliveForm::Comment
    }
    /// The whole answer in one body.
    fn collect(self, generation: Generation) -> impl Future<Output = Result<Self::Body, ApiError>> + Send;
}

/// The handler of an endpoint.
pub(crate) async fn handle<E: Endpoint>(
    State(app): State<Arc<App>>,
    Extension(origin): Extension<Origin>,
    headers: HeaderMap,
    body: Body,
) -> Response {
    let caller = Arc::clone(&origin.caller);
    let record = Record::new(&app, E::PATH, origin);
    match answer::<E>(&app, &caller.name, &record, &headers, body).await {
        Ok(response) => response,
        Err(error) => {
            record.fail(&error);
            error.into_response()
        }
    }
}

async fn answer<E: Endpoint>(
    app: &Arc<App>,
    caller: &str,
    record: &Arc<Record>,
    headers: &HeaderMap,
    body: Body,
) -> Result<Response, ApiError> {
    let fields = read_object(&app.options, headers, body).await?;
    let mut request = E::parse(app, caller, Fields::new(fields))?;
    {
        let mut facts = record.facts();
        request.model().clone_into(&mut facts.model);
        facts.stream = request.params().stream;
    }
    app.check_ready()?;
    let Params { form, tools, .. } = request.params();
    let guides = form.guides(app, tools).await?;
    let prompts = request.prompts(app).await?;
    record.facts().effort = prompts.first().and_then(|prompt| prompt.effort.clone());
    let id = random_id(E::ID_PREFIX);
    let generation = Generation::start(app, Arc::clone(record), &id, &prompts, request.params(), &guides)?;
    let stream = request.params().stream;
    let answer = request.answer(app, id, prompts);
    if stream {
        Ok(sse::respond(app, generation, answer))
    } else {
        Ok(Json(answer.collect(generation).await?).into_response())
    }
}
