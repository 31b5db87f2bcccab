//! What a model will take, computed without loading it.

use qwill_device::{Geometry, Precision, WeightFormat};
use qwill_weights::{Checkpoint, Quantize};

use crate::names::{Group, matrices, matrix_shape};
use crate::workspace::Widths;

/// Weights of one kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanGroup {
    /// For people: `GDN layers`.
    pub label: &'static str,
    /// Formats found in it, by size: `int4, bf16`.
    pub formats: String,
    /// Parameters.
    pub parameters: u64,
    /// Exact bytes on the device.
    pub bytes: u64,
}

/// Weights by kind, in the formats they will have after `quantize`. `matrix_bytes` is the device's
/// ([`qwill_device::Device::matrix_bytes`]), or a formula for a device that is not here.
pub fn plan_weights(
    checkpoint: &Checkpoint,
    quantize: Quantize,
    matrix_bytes: &dyn Fn(WeightFormat, usize, usize) -> u64,
) -> Vec<PlanGroup> {
    let geometry = &checkpoint.config().geometry;
    let mut groups = Vec::new();
    let all = matrices(geometry);
    for group in Group::ALL {
        let mut by_format: Vec<(WeightFormat, u64)> = Vec::new();
        let mut parameters = 0;
        for (name, _) in all.iter().filter(|(_, of)| *of == group) {
            let (rows, cols) = matrix_shape(geometry, name);
            // A missing tensor is loading's business to report; the plan counts it as bf16.
            let format = checkpoint.planned_format(name, quantize).unwrap_or(WeightFormat::Bf16);
            let bytes = matrix_bytes(format, rows, cols);
            parameters += (rows * cols) as u64;
            match by_format.iter_mut().find(|(seen, _)| *seen == format) {
                Some((_, total)) => *total += bytes,
                None => by_format.push((format, bytes)),
            }
        }
        if parameters > 0 {
            by_format.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
            let formats: Vec<&str> = by_format.iter().map(|(format, _)| format.name()).collect();
            let bytes = by_format.iter().map(|(_, bytes)| bytes).sum();
            groups.push(PlanGroup { label: group.label(), formats: formats.join(", "), parameters, bytes });
        }
    }
    let bytes = vector_elements(geometry) * 4;
    let formats = WeightFormat::F32.name().to_owned();
    groups.push(PlanGroup { label: "norms and small", formats, parameters: bytes / 4, bytes });
    groups
}

/// Bytes of the activation buffers for `max_rows` rows, and of the logits. `buffer_bytes` is the device's
/// ([`qwill_device::Device::buffer_bytes`]), or a formula for a device that is not here.
pub fn workspace_bytes(
    geometry: &Geometry,
    max_rows: usize,
    max_logit_rows: usize,
    buffer_bytes: &dyn Fn(usize, usize, Precision) -> u64,
) -> [(&'static str, u64); 2] {
    let widths = Widths::of(geometry).all().into_iter();
    let activations = widths.map(|(width, precision)| buffer_bytes(max_rows, width, precision)).sum();
    [("activations", activations), ("logits", buffer_bytes(max_logit_rows, geometry.vocab, Precision::Full))]
}

/// Elements of all norm weights and small GDN vectors.
fn vector_elements(geometry: &Geometry) -> u64 {
    let gdn = &geometry.gdn;
    let gdn_layer = gdn.conv_channels() * gdn.conv_width + 2 * gdn.value_heads + gdn.value_dim;
    let layers = geometry.layers.len() + geometry.mtp_layers;
    let norms = 2 * layers * geometry.hidden + geometry.hidden + geometry.mtp_layers * 3 * geometry.hidden;
    let head_norms = 2 * geometry.kv_layers() * geometry.attention.head_dim;
    (norms + head_norms + geometry.gdn_layers() * gdn_layer) as u64
}
