//! `qwill bench steps`: single steps of a model on a device, without engine and server, against what the device could
//! do at most.

mod cases;
mod chart;
mod floor;
mod measure;
mod report;
mod table;

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use qwill_device::{Device, Precision, WeightFormat};
use qwill_model::{Model, ModelOptions, StoredAs};
use qwill_weights::{Checkpoint, Quantize};

use crate::args::{BenchStepsArgs, ByteCount, MemoryArgs, Switch};
use crate::device::{Chosen, OpenDevice};
use crate::planning::Planned;
use crate::progress::LoadDisplay;
use crate::source::{self, ModelSource};
use cases::Case;
use measure::Measured;
use report::{Conditions, Report};

/// Elements of a buffer that is long enough for its padding not to count.
const MANY: usize = 1 << 20;

/// Measures, prints and writes what was asked for.
pub(crate) fn run(arguments: &BenchStepsArgs) -> Result<()> {
    let (origin, quantize) = origin(arguments)?;
    let checkpoint = origin.checkpoint(quantize)?;
    let mut cases =
        cases::cases(&arguments.sequences, &arguments.rows, arguments.context, &arguments.prefill);
    let chosen = Chosen::open(&checkpoint, quantize, &arguments.device, &arguments.numerics)?;
    let mut left_out = Vec::new();
    let planned = loop {
        match chosen.plan(&checkpoint, quantize, &needed_memory(arguments, &cases)) {
            Ok(planned) => break planned,
            Err(error) => left_out.push(cases::take_largest(&mut cases).ok_or(error)?.name()),
        }
    };
    let conditions = Conditions {
        model: model_name(&origin, &checkpoint),
        device: chosen.name(),
        numerics: chosen.numerics(crate::planning::body_format(&checkpoint, quantize)),
        context_tokens: arguments.context,
        repeats: arguments.repeat,
        left_out,
    };
    let run = Run { arguments, checkpoint, quantize, planned, cases, conditions };
    let report = match chosen.device {
        OpenDevice::Cpu(device, _) => run.on(*device)?,
        OpenDevice::Cuda(device) => run.on(*device)?,
    };
    if let Some(path) = &arguments.json {
        write_file(path, &format!("{:#}\n", report.as_json()))?;
    }
    if let Some(path) = &arguments.svg {
        write_file(path, &chart::svg(&report))?;
    }
    std::io::stdout().write_all(table::text(&report).as_bytes())?;
    Ok(())
}

/// Everything decided but the kind of device.
struct Run<'a> {
    arguments: &'a BenchStepsArgs,
    checkpoint: Checkpoint,
    quantize: Quantize,
    planned: Planned,
    cases: Vec<Case>,
    conditions: Conditions,
}

impl Run<'_> {
    fn on<D: Measured>(self, device: D) -> Result<Report> {
        // Before the model: they need memory of their own for a moment.
        let ceilings = device.ceilings().context("the device's ceilings cannot be measured")?;
        let activation_bytes = device.buffer_bytes(1, MANY, Precision::Activation) / MANY as u64;
        let mut model = self.load(device)?;
        let (checkpoint, quantize) = (&self.checkpoint, self.quantize);
        let format = |name: &str| checkpoint.planned_format(name, quantize).unwrap_or(WeightFormat::Bf16);
        let memory = &self.planned.memory;
        let stored = StoredAs {
            matrix: &format,
            kv_type: memory.kv_type,
            state_type: memory.state_type,
            activation_bytes,
        };
        let steps = self
            .cases
            .iter()
            .map(|case| measure::step(&mut model, case, &stored, &ceilings, self.arguments.repeat))
            .collect::<Result<_, _>>()?;
        Ok(Report { conditions: self.conditions, ceilings, steps })
    }

    fn load<D: Device>(&self, device: D) -> Result<Model<D>> {
        let memory = &self.planned.memory;
        let options = ModelOptions {
            quantize: self.quantize,
            kv_type: memory.kv_type,
            state_type: memory.state_type,
            pages: memory.pages,
            slots: memory.slots,
            host_granules: 0,
            max_rows: memory.max_rows,
            max_logit_rows: memory.max_logit_rows,
        };
        let mut display = LoadDisplay::new("loading");
        Ok(Model::load(device, &self.checkpoint, &options, &mut |progress| display.show(progress))?)
    }
}

fn origin(arguments: &BenchStepsArgs) -> Result<(ModelSource, Quantize)> {
    let quantize = arguments.quantize.map(Quantize::from);
    Ok(match (&arguments.model_dir, &arguments.random) {
        (Some(directory), _) => {
            (ModelSource::Directory(directory.clone()), quantize.unwrap_or(Quantize::None))
        }
        (None, Some(name)) => {
            let geometry = Box::new(source::geometry(name)?);
            (ModelSource::Random { geometry, seed: 0 }, quantize.unwrap_or(Quantize::Int4))
        }
        (None, None) => (ModelSource::Embedded, quantize.unwrap_or(Quantize::None)),
    })
}

/// Exactly what the largest case needs.
fn needed_memory(arguments: &BenchStepsArgs, cases: &[Case]) -> MemoryArgs {
    let most = |of: fn(&Case) -> usize| cases.iter().map(of).max().unwrap_or(1);
    MemoryArgs {
        memory: arguments.memory,
        max_sequences: Some(most(|case| case.batch.spans.len())),
        max_context: None,
        kv_tokens: Some(most(|case| case.batch.page_table.len()) * qwill_device::batch::PAGE_TOKENS),
        prefill_slice: most(|case| case.batch.rows()).max(qwill_device::batch::CHUNK_TOKENS),
        host_cache: Some(ByteCount(0)),
        prefix_cache: Switch::Off,
        snapshot_tokens: 4096,
    }
}

fn model_name(origin: &ModelSource, checkpoint: &Checkpoint) -> String {
    format!("{} ({})", checkpoint.config().geometry.name, origin.describe())
}

fn write_file(path: &Path, text: &str) -> Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
