//! `qwill plan`: the memory plan of a model, for this machine or another, without loading anything.

use std::io::Write;

use anyhow::Result;
use qwill_device::plan::MemoryPlan;
use qwill_device::{KvType, StateType};
use qwill_model::PlanGroup;
use serde_json::{Value, json};

use crate::args::PlanArgs;
use crate::device::Chosen;
use crate::planning::{self, HostCache, Planned, Sizes};
use crate::source::{self, ModelSource};
use crate::units;

/// Prints the plan.
pub(crate) fn run(arguments: &PlanArgs) -> Result<()> {
    let origin = match &arguments.geometry {
        Some(name) => ModelSource::Random { geometry: Box::new(source::geometry(name)?), seed: 0 },
        None => ModelSource::of(&arguments.model, None)?,
    };
    let quantize = arguments.model.quantize.into();
    let checkpoint = origin.checkpoint(quantize)?;
    let planned = match arguments.gpu {
        Some(gpu) => {
            let limit = arguments.device.gpu_memory;
            let budget_bytes = limit.map_or(gpu.0, |limit| limit.0.min(gpu.0));
            let kv_type = arguments.numerics.kv_type.map_or(KvType::Bf16, KvType::from);
            let state_type = StateType::from(arguments.numerics.state_type);
            let options = planning::options(&arguments.memory, kv_type, state_type);
            let host_cache = HostCache::elsewhere(&arguments.memory);
            let sizes = Sizes::of_a_gpu();
            planning::plan_checkpoint(&checkpoint, quantize, options, host_cache, budget_bytes, &sizes)?
        }
        None => Chosen::open(&checkpoint, quantize, &arguments.device, &arguments.numerics)?.plan(
            &checkpoint,
            quantize,
            &arguments.memory,
        )?,
    };
    let name = match &origin {
        ModelSource::Random { geometry, .. } => geometry.name.clone(),
        other => format!("{} ({})", checkpoint.config().geometry.name, other.describe()),
    };
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{:#}", as_json(&name, &planned))?;
    } else {
        writeln!(
            out,
            "{name}: {} parameters\n\n{}",
            units::parameters(planned.parameters()),
            planned.memory
        )?;
    }
    Ok(())
}

fn as_json(name: &str, planned: &Planned) -> Value {
    let MemoryPlan {
        budget_bytes,
        pages,
        slots,
        max_context_tokens,
        prefill_rows,
        kv_type,
        state_type,
        host,
        ..
    } = &planned.memory;
    let host_cache = host.map(|host| {
        json!({
            "bytes": host.bytes(),
            "granules": host.granules,
            "granule_bytes": host.granule_bytes,
            "snapshot_bytes": host.state_bytes,
            "snapshots": host.most_states(),
        })
    });
    let rows: Vec<Value> = planned
        .memory
        .rows()
        .iter()
        .map(|row| json!({"section": row.section.name(), "name": row.name, "detail": row.detail, "bytes": row.bytes}))
        .collect();
    let weights: Vec<Value> = planned
        .weights
        .iter()
        .map(|PlanGroup { label, formats, parameters, bytes }| {
            json!({"group": label, "formats": formats, "parameters": parameters, "bytes": bytes})
        })
        .collect();
    json!({
        "model": name,
        "parameters": planned.parameters(),
        "budget_bytes": budget_bytes,
        "total_bytes": planned.memory.total_bytes(),
        "left_bytes": planned.memory.left_bytes(),
        "max_sequences": slots,
        "kv_pages": pages,
        "kv_tokens": planned.memory.kv_tokens(),
        "kv_type": kv_type.name(),
        "state_type": state_type.name(),
        "max_context_tokens": max_context_tokens,
        "prefill_slice_tokens": prefill_rows,
        "host_cache": host_cache,
        "rows": rows,
        "weights": weights,
    })
}
