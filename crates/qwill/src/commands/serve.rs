//! `qwill serve`: everything is checked and loaded, then the port opens, then signals decide.

mod check;
mod keys;
mod reload;
mod tls;

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Context, Result};
use qwill_cuda::CudaGauge;
use qwill_device::plan::{MemoryPlan, PlanSection};
use qwill_server::{EngineMetrics, MemoryPart, SamplingDefaults, Server, ServerOptions, TextModel};
use qwill_weights::GenerationDefaults;
use tokio::signal::unix::{SignalKind, signal};

use crate::args::{ListenArgs, LogFormat, SamplingArgs, ServeArgs};
use crate::launch::{self, Launch, Serving};
use crate::screen::Access;
use crate::supervisor::State;
use crate::{logging, screen, settings, supervisor};

/// Exit code after a second signal: 128 + SIGINT, as a shell would report it.
const INTERRUPTED: i32 = 130;

/// How far the memory taken of a GPU may be from the plan: drivers round allocations up, and other processes come and
/// go.
const PLAN_TOLERANCE_BYTES: u64 = 200 << 20;

/// How long the engine may take to end its last step after everybody has been answered.
const STOP_PATIENCE: Duration = Duration::from_mins(1);
/// The same of an engine that has failed or is stuck.
const BROKEN_PATIENCE: Duration = Duration::from_secs(2);

/// Serves until a signal.
pub(crate) fn run(arguments: &ServeArgs) -> Result<()> {
    if arguments.check {
        return check::run(arguments);
    }
    logging::start(&arguments.log)?;
    if let Some(file) = &arguments.settings.file {
        tracing::info!(file = %file.display(), "settings are read; `qwill serve --check` prints them");
    }
    for name in settings::unknown_variables() {
        tracing::warn!("{name} is set, but there is no such setting: see `qwill serve --help`");
    }
    let bind = SocketAddr::new(arguments.listen.host, arguments.listen.port);
    // A taken port should fail now, not after a long load. It stays closed until the model is ready, so that
    // whoever can connect gets an answer.
    launch::check_address(bind)?;
    let api_keys = keys::of(&arguments.listen)?;
    keys::check_openness(bind, &api_keys, &arguments.listen)?;
    let tls = tls::of(&arguments.listen)?;

    let launch = prepare(arguments)?;
    let with_screen = arguments.log.log_format == LogFormat::Text;
    if with_screen {
        print!("{}", screen::opening(&launch));
    } else {
        log_opening(&launch);
    }
    let options = ServerOptions {
        bind,
        allowed_hosts: arguments.listen.allowed_host.clone(),
        max_connections: arguments.listen.max_connections,
        body_limit_bytes: arguments.listen.body_limit.0 as usize,
        request_timeout: arguments.listen.request_timeout.map(Duration::from_secs),
        queue_timeout: arguments.listen.queue_timeout.map(Duration::from_secs),
        stall_timeout: Duration::from_secs(arguments.listen.stall_timeout),
        exit_on_failure: arguments.listen.exit_on_failure,
        log_prompts: arguments.log.log_prompts,
        drain_timeout: Duration::from_secs(arguments.listen.drain_timeout),
        defaults: defaults(&launch.source.checkpoint.config().generation, &arguments.sampling),
        strict_params: arguments.listen.strict_params,
        lenient_model_names: arguments.api.lenient_model_names.into(),
        stored_responses: arguments.api.stored_responses,
        stored_responses_bytes: arguments.api.stored_responses_size.0 as usize,
        chat_template_kwargs: launch.source.origin.template_arguments(arguments.listen.thinking),
        api_keys,
        tls,
        admin_key: arguments.listen.admin_key.clone(),
        allow_no_key: arguments.listen.allow_no_key,
        cors_origins: cors_origins(&arguments.listen),
        engine_metrics: Some(EngineMetrics::install()?),
        memory: memory_parts(&launch.planned.memory),
        ..ServerOptions::default()
    };
    let names = match arguments.listen.served_name.as_slice() {
        [] => vec![launch.source.name.clone()],
        names => names.to_vec(),
    };
    let (text, started) = (launch.source.text.clone(), launch.started);
    let (gauge, planned_bytes) = (launch.gauge(), launch.planned.memory.total_bytes());
    let (handle, engine) = launch.start(Serving {
        model_names: names,
        queue_capacity: arguments.listen.queue,
        max_stall: Duration::from_millis(arguments.listen.max_stall_ms),
        fault: arguments.fault,
    })?;
    let allocated_bytes = gauge.as_ref().map(CudaGauge::allocated_bytes);
    let taken_bytes = gauge.and_then(|gauge| taken_as_planned(&gauge, planned_bytes));
    let announce = |address: SocketAddr, access: Access| {
        let elapsed_s = started.elapsed().as_secs_f64();
        if with_screen {
            print!("{}", screen::ready(address, elapsed_s, taken_bytes, access));
        } else {
            tracing::info!(
                url = format!("{}://{address}", access.scheme()),
                elapsed_s,
                allocated_bytes,
                taken_bytes,
                "ready"
            );
        }
        supervisor::notify(State::Ready);
    };
    let served = serve(options, handle, text, &arguments.listen, announce);
    // A broken engine may never end.
    let patience = if served.is_ok() { STOP_PATIENCE } else { BROKEN_PATIENCE };
    let ended = engine.stop_within(patience).map_err(anyhow::Error::from);
    served.and(ended)
}

/// Everything that can be known without the weights.
fn prepare(arguments: &ServeArgs) -> Result<Launch> {
    let ServeArgs { model, random, device, numerics, memory, speculation, disk, .. } = arguments;
    Launch::prepare(model, Some(random), device, numerics, memory, speculation)?.with_disk_cache(disk)
}

/// The plan, row by row, and the host's memory where that is not the device's.
fn memory_parts(plan: &MemoryPlan) -> Vec<MemoryPart> {
    let part = |section: PlanSection, name: &str, bytes| MemoryPart {
        section: section.name().into(),
        name: name.into(),
        bytes,
    };
    let mut parts: Vec<_> = plan.rows().iter().map(|row| part(row.section, &row.name, row.bytes)).collect();
    let counted = plan.rows().iter().any(|row| row.section == PlanSection::Host);
    parts.extend(
        plan.host.filter(|_| !counted).map(|host| part(PlanSection::Host, "pages and states", host.bytes())),
    );
    parts
}

/// What the GPU has given, a warning where that is more than was planned.
fn taken_as_planned(gauge: &CudaGauge, planned_bytes: u64) -> Option<u64> {
    let taken_bytes = gauge.taken_bytes().ok()?;
    if taken_bytes > planned_bytes + PLAN_TOLERANCE_BYTES {
        tracing::warn!(taken_bytes, planned_bytes, "the GPU's memory was filled beyond the plan");
    }
    Some(taken_bytes)
}

/// What the start screen says, for machines.
fn log_opening(launch: &Launch) {
    let plan = &launch.planned.memory;
    tracing::info!(
        version = crate::VERSION,
        model = launch.source.name,
        parameters = launch.planned.parameters(),
        numerics = launch.numerics(),
        speculation = launch.speculation.mode.name(),
        device = launch.chosen.name(),
        unused = launch.chosen.notes.join("; "),
        plan_bytes = plan.total_bytes(),
        driver_bytes = launch.chosen.driver_bytes(),
        budget_bytes = plan.budget_bytes,
        sequences = plan.slots,
        kv_tokens = plan.kv_tokens(),
        context_tokens = plan.max_context_tokens,
        host_cache_bytes = plan.host.map_or(0, |host| host.bytes()),
        "starting"
    );
}

fn serve(
    options: ServerOptions,
    engine: qwill_contract::EngineHandle,
    text: TextModel,
    listen: &ListenArgs,
    announce: impl FnOnce(SocketAddr, Access),
) -> Result<()> {
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the async runtime")?;
    runtime.block_on(async {
        let access = Access { with_key: !options.api_keys.is_empty(), with_tls: options.tls.is_some() };
        let tls = options.tls.clone();
        // Signals are caught before the address is announced: whoever reads it may send one at once.
        let shutdown = shutdown()?;
        let server = Server::bind(options, engine, text).await?;
        reload::on_hangup(server.key_ring(), tls, listen.clone())?;
        announce(server.local_addr(), access);
        server.run(shutdown).await?;
        Ok(())
    })
}

/// Completes at the first SIGINT or SIGTERM; the second one ends the process at once.
fn shutdown() -> Result<impl Future<Output = ()> + Send + 'static> {
    let mut interrupt = signal(SignalKind::interrupt()).context("catching SIGINT")?;
    let mut terminate = signal(SignalKind::terminate()).context("catching SIGTERM")?;
    Ok(async move {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
        }
        tracing::info!("a signal: no new work is taken; a second one ends at once");
        supervisor::notify(State::Stopping);
        tokio::spawn(async move {
            tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            }
            tracing::warn!("second signal: ending at once");
            std::process::exit(INTERRUPTED);
        });
    })
}

/// `none` is no origin.
fn cors_origins(arguments: &ListenArgs) -> Vec<String> {
    arguments.cors_origins.iter().filter(|origin| *origin != "none").cloned().collect()
}

/// Flags first, then what the checkpoint's makers chose, then the `OpenAI` defaults.
pub(crate) fn defaults(model: &GenerationDefaults, flags: &SamplingArgs) -> SamplingDefaults {
    let usual = SamplingDefaults::default();
    let greedy = model.do_sample == Some(false);
    let of_model = model.temperature.filter(|_| !greedy).map(|temperature| temperature.clamp(0.0, 2.0));
    let temperature = flags.temperature.or(of_model).unwrap_or(if greedy { 0.0 } else { usual.temperature });
    SamplingDefaults {
        temperature,
        top_p: flags.top_p.or(model.top_p.filter(|p| *p > 0.0)).unwrap_or(usual.top_p),
        top_k: flags.top_k.or(model.top_k.map(|k| k as usize)).unwrap_or(usual.top_k),
        min_p: flags.min_p.unwrap_or(usual.min_p),
        repetition_penalty: flags
            .repetition_penalty
            .or(model.repetition_penalty.filter(|penalty| (f32::MIN_POSITIVE..=10.0).contains(penalty)))
            .unwrap_or(usual.repetition_penalty),
        max_tokens: flags.max_tokens,
        ..usual
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_defaults_come_from_flags_then_the_model_then_convention() {
        let nothing = defaults(&GenerationDefaults::default(), &SamplingArgs::default());
        assert_eq!(nothing, SamplingDefaults::default());
        let model = GenerationDefaults {
            temperature: Some(0.6),
            top_p: Some(0.95),
            top_k: Some(20),
            repetition_penalty: Some(1.1),
            do_sample: Some(true),
        };
        let of_model = defaults(&model, &SamplingArgs::default());
        assert_eq!((of_model.temperature, of_model.top_p, of_model.top_k), (0.6, 0.95, 20));
        assert_eq!(of_model.repetition_penalty, 1.1);
        let both = defaults(
            &model,
            &SamplingArgs { temperature: Some(0.0), top_k: Some(0), ..SamplingArgs::default() },
        );
        assert_eq!((both.temperature, both.top_p, both.top_k), (0.0, 0.95, 0));
    }

    #[test]
    fn a_model_that_does_not_sample_is_greedy_unless_a_flag_says_otherwise() {
        let model =
            GenerationDefaults { do_sample: Some(false), temperature: Some(0.7), ..Default::default() };
        assert_eq!(defaults(&model, &SamplingArgs::default()).temperature, 0.0);
        assert_eq!(
            defaults(&model, &SamplingArgs { temperature: Some(1.5), ..SamplingArgs::default() }).temperature,
            1.5
        );
    }
}
