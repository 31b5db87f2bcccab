//! `quantization_config`: how packed tensors are to be read. *Which* modules are packed is decided by the
//! tensors that exist, because exporters leave whole parts (the MTP module) out of their ignore lists.

use crate::error::WeightsError;
use crate::json::Fields;

/// The packings that can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Quantization {
    /// `qweight`, `qzeros`, `scales`: words along the inputs, inputs-major.
    Gptq {
        /// Whether `qzeros` holds the zero point itself (`gptq_v2`) or one less (`gptq`).
        true_zero_point: bool,
    },
    /// `weight_packed`, `weight_scale`: words along the inputs, outputs-major.
    CompressedTensors,
}

impl Quantization {
    /// Reads the field of `config.json`; older compressed-tensors files call it `compression_config`.
    pub(crate) fn parse(config: &Fields) -> Result<Option<Self>, WeightsError> {
        const METHODS: [&str; 4] = ["gptq", "auto-round", "intel/auto-round", "compressed-tensors"];
        let Some(key) =
            ["quantization_config", "compression_config"].into_iter().find(|key| config.get(key).is_some())
        else {
            return Ok(None);
        };
        let fields = config.with_nested(key)?;
        match fields.choice("quant_method", &METHODS)? {
            Some("gptq") => {
                let format = fields.choice("checkpoint_format", &["gptq", "gptq_v2"])?;
                Ok(Some(Self::Gptq { true_zero_point: format == Some("gptq_v2") }))
            }
            Some("auto-round" | "intel/auto-round") => {
                // The plain packing stores zero points as they are; the one made for GPTQ kernels, one less.
                let packings = ["auto_round:auto_gptq", "auto_round:gptq", "auto_round"];
                match fields.choice("packing_format", &packings)? {
                    Some(format) => Ok(Some(Self::Gptq { true_zero_point: format == "auto_round" })),
                    None => Err(fields.absent("packing_format", packings.join(", "))),
                }
            }
            Some(_) => {
                // "mixed-precision" names the format per group; the tensors of each module tell them apart.
                fields.choice("format", &["pack-quantized", "mixed-precision"])?;
                Ok(Some(Self::CompressedTensors))
            }
            None => Err(fields.absent("quant_method", METHODS.join(", "))),
        }
    }
}
