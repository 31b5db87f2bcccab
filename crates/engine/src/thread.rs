use std::any::Any;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, bounded};
use qwill_contract::{EngineHandle, EngineInbox, EngineState, FinishReason, Load, engine_channel};

use crate::disk::DiskCache;
use crate::engine::{Engine, refuse};
use crate::{EngineError, EngineOptions, StepModel};

/// How long a finished engine still answers: a request may have passed the handle's look at the state just before
/// the state changed.
const LAST_CALL: Duration = Duration::from_millis(50);

/// How often [`EngineThread::stop_within`] looks.
const STOP_LOOK: Duration = Duration::from_millis(5);

/// A running engine's thread.
pub struct EngineThread {
    thread: JoinHandle<()>,
    ready: Receiver<Result<(), EngineError>>,
    load: Arc<Load>,
}

/// Starts an engine and returns at once. `build` makes the model on the engine's own thread; the engine is ready
/// when the model has really generated a token ([`EngineThread::wait_ready`]). Requests may be submitted before
/// that: they wait.
///
/// The thread ends when a drain is asked for ([`EngineThread::stop`], [`Load::request_drain`]) or every handle is
/// dropped, and all requests are finished; or when the device has failed for good. Whatever happens, a panic
/// included, every accepted request gets its `End`.
pub fn start<M, E>(
    options: EngineOptions,
    build: impl FnOnce() -> Result<M, E> + Send + 'static,
) -> Result<(EngineHandle, EngineThread), EngineError>
where
    M: StepModel,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    options.check()?;
    let disk = options.disk_cache.clone().map(DiskCache::open).transpose()?;
    let (handle, inbox) = engine_channel(options.facts());
    let (ready_sender, ready) = bounded(1);
    let load = Arc::clone(&inbox.load);
    let thread = std::thread::Builder::new()
        .name("engine".to_owned())
        .spawn(move || run((options, disk), &inbox, ready_sender, build))
        .map_err(EngineError::Spawn)?;
    Ok((handle, EngineThread { thread, ready, load }))
}

impl EngineThread {
    /// Waits until the engine takes requests, or says why it never will.
    pub fn wait_ready(&self) -> Result<(), EngineError> {
        // The answer is sent once; later callers find the channel closed and look at the state.
        self.ready.recv().unwrap_or_else(|_| self.failure())
    }

    /// Asks the engine to finish what it has, waiting requests included, and waits for it.
    pub fn stop(self) -> Result<(), EngineError> {
        self.load.request_drain();
        self.join()
    }

    /// As [`EngineThread::stop`], but gives up on a step that does not end; the thread is left alone then.
    pub fn stop_within(self, patience: Duration) -> Result<(), EngineError> {
        self.load.request_drain();
        let deadline = Instant::now() + patience;
        while !self.thread.is_finished() {
            if Instant::now() >= deadline {
                return Err(EngineError::Stuck(patience));
            }
            std::thread::sleep(STOP_LOOK);
        }
        self.join()
    }

    /// Waits for the thread's end.
    pub fn join(self) -> Result<(), EngineError> {
        if let Err(panic) = self.thread.join() {
            return Err(EngineError::Failed(panic_message(&*panic)));
        }
        match self.load.state() {
            EngineState::Failed(message) => Err(EngineError::Failed(message)),
            _ => Ok(()),
        }
    }

    fn failure(&self) -> Result<(), EngineError> {
        match self.load.state() {
            EngineState::Failed(message) => Err(EngineError::Failed(message)),
            _ => Ok(()),
        }
    }
}

fn run<M, E>(
    (options, disk): (EngineOptions, Option<DiskCache>),
    inbox: &EngineInbox,
    ready: Sender<Result<(), EngineError>>,
    build: impl FnOnce() -> Result<M, E>,
) where
    M: StepModel,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let load = &inbox.load;
    let prepared = catch_unwind(AssertUnwindSafe(|| prepare((options, disk), load, build)))
        .unwrap_or_else(|panic| Err(EngineError::Failed(panic_message(&*panic))));
    // Whether anybody waits for the answer does not matter. With the sender dropped, later waiters look at the state.
    let farewell = match prepared {
        Ok(engine) => {
            load.set_state(EngineState::Ready);
            let _ = ready.send(Ok(()));
            drop(ready);
            serve(engine, inbox)
        }
        Err(error) => {
            let message = error.chain();
            load.set_state(EngineState::Failed(message.clone()));
            let _ = ready.send(Err(error));
            drop(ready);
            message
        }
    };
    let reason = FinishReason::Error { message: farewell };
    while let Ok(submission) = inbox.submissions.recv_timeout(LAST_CALL) {
        refuse(load, submission, &reason);
    }
}

fn prepare<M, E>(
    (options, disk): (EngineOptions, Option<DiskCache>),
    load: &Arc<Load>,
    build: impl FnOnce() -> Result<M, E>,
) -> Result<Engine<M>, EngineError>
where
    M: StepModel,
    E: Into<Box<dyn Error + Send + Sync>>,
{
    let model = build().map_err(|error| EngineError::Build(error.into()))?;
    let mut engine = Engine::new(model, options, Arc::clone(load));
    if let Some(disk) = disk {
        engine.attach_disk(disk).map_err(|error| EngineError::SelfTest(error.to_string()))?;
    }
    engine.self_test().and_then(|()| engine.warm_up()).map_err(EngineError::SelfTest)?;
    Ok(engine)
}

/// Serves to the end. Returns what to tell requests that come after it.
fn serve<M: StepModel>(mut engine: Engine<M>, inbox: &EngineInbox) -> String {
    let served = catch_unwind(AssertUnwindSafe(|| engine.serve(inbox)))
        .unwrap_or_else(|panic| Err(panic_message(&*panic)));
    let Err(message) = served else {
        inbox.load.set_state(EngineState::Stopped);
        return "the server is shutting down".to_owned();
    };
    tracing::error!(message, "the engine has failed");
    inbox.load.set_state(EngineState::Failed(message.clone()));
    let message = format!("the engine has failed: {message}");
    // Not even a sink that panics may keep the others from their end.
    while catch_unwind(AssertUnwindSafe(|| engine.fail_all(&message))).is_err() {}
    message
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let words =
        panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panic: {}", words.unwrap_or("without a message"))
}
