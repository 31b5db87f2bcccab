use std::borrow::Cow;
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use qwill_device::numeric::{bf16_to_f32, f16_to_f32};
use qwill_device::{Geometry, WeightFormat};

use crate::cache::{Cache, CacheLayout, WeightCache};
use crate::config::ModelConfig;
use crate::error::{WeightsError, shape};
use crate::files::{Files, Tensor};
use crate::header::Dtype;
use crate::layout::{Layout, VectorSpec};
use crate::matrix::{Matrix, MatrixSpec};
use crate::memory::{Memory, numbers};
use crate::quantize::Quantize;
use crate::random::RandomWeights;
use crate::stored::Stored;
use crate::stream::Job;

/// The weights of one model, by canonical name: without the nesting prefix, matrices without `.weight`.
///
/// Opening checks every tensor that the configuration calls for: present, of a supported type, of the right
/// shape. Reading checks content where it can be wrong in silence: zero points, group order, scales, and NaN
/// or infinity in vectors. Shared freely between threads.
#[derive(Debug)]
pub struct Checkpoint {
    config: ModelConfig,
    source: Source,
    cache: WeightCache,
}

#[derive(Debug)]
enum Source {
    /// Files, and the shape `[rows, cols]` of every matrix of the geometry.
    Files {
        files: Files,
        shapes: HashMap<String, (usize, usize)>,
    },
    Random(RandomWeights),
}

impl Checkpoint {
    /// Opens a Hugging Face directory: `config.json`, optionally `generation_config.json`, and safetensors
    /// files, with or without an index. Files that the index does not list are read too. Only headers are read
    /// here: the files must stay as they are while the checkpoint is in use.
    pub fn open(directory: &Path) -> Result<Self, WeightsError> {
        Self::from_files(Files::open(directory)?)
    }

    /// The same from named files in memory.
    pub fn embedded(files: Vec<(&'static str, &'static [u8])>) -> Result<Self, WeightsError> {
        Self::from_files(Files::embedded(files)?)
    }

    /// Random weights of a geometry, a function of the seed and each tensor's name, made as they are read.
    /// `format` says how they "are stored": bf16, or directly in the formats of that policy.
    pub fn random(geometry: &Geometry, seed: u64, format: Quantize) -> Self {
        Self {
            config: ModelConfig::of_geometry(geometry),
            source: Source::Random(RandomWeights::new(geometry, seed, format)),
            cache: WeightCache::Off,
        }
    }

    fn from_files(files: Files) -> Result<Self, WeightsError> {
        let Some(config) = files.read("config.json")? else {
            let found = "weights alone".to_owned();
            return Err(WeightsError::NoCheckpoint { place: files.place(), found, expected: "config.json" });
        };
        let generation = files.read("generation_config.json")?;
        let mut config = ModelConfig::parse(&config, generation.as_deref())?;
        let has_head = ["weight", "weight_packed", "qweight"]
            .iter()
            .any(|suffix| files.tensor(&format!("lm_head.{suffix}")).is_some());
        let has_mtp = files.names().any(|name| name.starts_with("mtp."));
        config.settle(&files.short_name(), has_head, has_mtp);
        check_layers(&files, &config.geometry)?;
        let layout = Layout::of(&config.geometry);
        for spec in &layout.matrices {
            Stored::find(&files, config.quantization, &spec.name, spec.rows, spec.cols)?;
        }
        for spec in &layout.vectors {
            find_vector(&files, spec)?;
        }
        let shapes = layout.matrices.into_iter().map(|spec| (spec.name, (spec.rows, spec.cols))).collect();
        Ok(Self { config, source: Source::Files { files, shapes }, cache: WeightCache::Off })
    }

    /// The same checkpoint; what [`crate::stream`] rounds is kept there for the next time. Only directories have such
    /// a cache.
    #[must_use]
    pub fn with_cache(self, cache: WeightCache) -> Self {
        Self { cache, ..self }
    }

    /// What tells a directory's checkpoint from others, and from itself after a change: its configuration, and names,
    /// lengths and times of its weights. `None` for others, or where that cannot be told.
    pub fn identity(&self) -> Option<Vec<u8>> {
        match &self.source {
            Source::Files { files, .. } => files.identity(),
            Source::Random(_) => None,
        }
    }

    /// What `config.json` and `generation_config.json` say.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The bytes of a file beside the weights (`tokenizer.json`, `chat_template.jinja`, ...). `None` when there
    /// is none, for random weights, and for anything that is not a plain file name.
    pub fn file(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, WeightsError> {
        match &self.source {
            Source::Files { files, .. } => files.read(name),
            Source::Random(_) => Ok(None),
        }
    }

    /// Whether there is a tensor of that full name or a matrix of that module name.
    pub fn has(&self, name: &str) -> bool {
        match &self.source {
            Source::Files { files, .. } => {
                files.tensor(name).is_some()
                    || ["weight", "weight_packed", "qweight"]
                        .iter()
                        .any(|suffix| files.tensor(&format!("{name}.{suffix}")).is_some())
            }
            Source::Random(random) => {
                let module = name.strip_suffix(".weight").unwrap_or(name);
                random.matrix_spec(module).is_some() || random.vector_spec(name).is_some()
            }
        }
    }

    /// The format of a matrix of the geometry as stored; `None` for any other name.
    pub fn format_of(&self, name: &str) -> Option<WeightFormat> {
        match &self.source {
            Source::Files { files, shapes } => {
                let &(rows, cols) = shapes.get(name)?;
                let stored = Stored::find(files, self.config.quantization, name, rows, cols);
                stored.ok().map(|stored| stored.format())
            }
            Source::Random(random) => random.matrix_spec(name).map(|_| random.format_of(name)),
        }
    }

    /// The format that [`Checkpoint::matrix`] gives, without reading anything; `None` as for
    /// [`Checkpoint::format_of`].
    pub fn planned_format(&self, name: &str, quantize: Quantize) -> Option<WeightFormat> {
        self.format_of(name).map(|stored| planned(stored, name, quantize))
    }

    /// Reads the matrix `[rows, cols]` of a module and rounds it if `quantize` says so. Takes the time of one
    /// pass over the matrix; matrices may be read from several threads at once.
    pub fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        quantize: Quantize,
    ) -> Result<Matrix, WeightsError> {
        let mut matrix = Matrix::default();
        let spec = MatrixSpec { name: name.to_owned(), rows, cols };
        self.read_rows(&spec, 0..rows, quantize, &mut Memory::default(), &mut matrix)?;
        Ok(matrix)
    }

    /// The same for some rows: `range` begins at a multiple of [`qwill_device::matrix::BLOCK_ROWS`] and ends at one or
    /// with the matrix. `stored` is memory for bytes on their way.
    pub(crate) fn read_rows(
        &self,
        spec: &MatrixSpec,
        range: Range<usize>,
        quantize: Quantize,
        stored: &mut Memory,
        out: &mut Matrix,
    ) -> Result<(), WeightsError> {
        let MatrixSpec { name, rows, cols } = spec;
        match &self.source {
            Source::Files { files, .. } => {
                let found = Stored::find(files, self.config.quantization, name, *rows, *cols)?;
                found.read_rows(range, planned(found.format(), name, quantize), stored, out)
            }
            Source::Random(random) => {
                let known = random.matrix_spec(name).ok_or_else(|| not_in_geometry(name, &[*rows, *cols]))?;
                if known != spec {
                    return Err(random_shape(name, &[known.rows, known.cols], &[*rows, *cols]));
                }
                let format = random.format_of(name);
                match planned(format, name, quantize) {
                    same if same == format => random.rows(spec, range, out),
                    rounded => {
                        let mut dense = Matrix { elements: std::mem::take(stored), ..Matrix::default() };
                        random.rows(spec, range.clone(), &mut dense);
                        *stored = dense.elements;
                        out.reshape(rounded, range.len(), *cols);
                        // Made of finite numbers: the scales are.
                        let _ = out.round(format, stored);
                    }
                }
                Ok(())
            }
        }
    }

    /// The cache of the rounded ones among blocks, if one is wanted and possible.
    pub(crate) fn open_cache(&self, quantize: Quantize, jobs: &[Job<'_>]) -> Option<Cache> {
        let Source::Files { files, .. } = &self.source else { return None };
        let path = self.cache.file(files.directory()?, quantize.label())?;
        let layout = CacheLayout::new(&files.identity()?, jobs)?;
        Cache::open(path, layout)
    }

    /// Every matrix that the geometry calls for.
    pub fn matrices(&self) -> Vec<MatrixSpec> {
        Layout::of(&self.config.geometry).matrices
    }

    /// Full name and shape of every small tensor that the geometry calls for.
    pub fn vectors(&self) -> Vec<(String, Vec<usize>)> {
        let vectors = Layout::of(&self.config.geometry).vectors;
        vectors.into_iter().map(|spec| (spec.name.clone(), spec.shapes().swap_remove(0))).collect()
    }

    /// Reads a small tensor of `len` elements as f32, by its full name: `layers.0.input_layernorm.weight`,
    /// `layers.0.linear_attn.A_log`, `layers.0.linear_attn.conv1d.weight` (flattened), ...
    pub fn vector(&self, name: &str, len: usize) -> Result<Vec<f32>, WeightsError> {
        match &self.source {
            Source::Files { files, .. } => {
                let tensor = files.tensor(name).ok_or_else(|| missing_vector(files, name, &[len]))?;
                if tensor.shape.iter().product::<usize>() != len {
                    return Err(tensor.fault("length", shape(tensor.shape), format!("{len} elements")));
                }
                widen(tensor)
            }
            Source::Random(random) => {
                let spec = random.vector_spec(name).ok_or_else(|| not_in_geometry(name, &[len]))?;
                if spec.len != len {
                    return Err(random_shape(name, &[spec.len], &[len]));
                }
                Ok(random.vector(spec))
            }
        }
    }

    /// Canonical full names of all tensors (vision left out), in order.
    pub fn names(&self) -> impl Iterator<Item = Cow<'_, str>> {
        let (stored, made) = match &self.source {
            Source::Files { files, .. } => (Some(files.names().map(Cow::Borrowed)), None),
            Source::Random(random) => (None, Some(random.names().into_iter().map(Cow::Owned))),
        };
        stored.into_iter().flatten().chain(made.into_iter().flatten())
    }

    /// Bytes of all tensors as stored (vision left out).
    pub fn total_bytes(&self) -> u64 {
        match &self.source {
            Source::Files { files, .. } => files.total_bytes(),
            Source::Random(random) => random.total_bytes(),
        }
    }
}

/// Stored codes stay; dense matrices follow the policy.
fn planned(stored: WeightFormat, name: &str, quantize: Quantize) -> WeightFormat {
    match stored {
        WeightFormat::Int8 | WeightFormat::Int4 => stored,
        dense => quantize.target(name).unwrap_or(dense),
    }
}

/// No layer beyond those of the configuration: running a part of a model would give fluent nonsense.
fn check_layers(files: &Files, geometry: &Geometry) -> Result<(), WeightsError> {
    let counts = [("layers.", geometry.layers.len()), ("mtp.layers.", geometry.mtp_layers)];
    for name in files.names() {
        for (prefix, count) in counts {
            let number =
                name.strip_prefix(prefix).and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
            // A module that the configuration switches off altogether may still be stored.
            if let (Some(n), Some(tensor)) = (number.filter(|&n| n >= count && count > 0), files.tensor(name))
            {
                let expected =
                    format!("{count} {}layers, as config.json says", prefix.trim_end_matches("layers."));
                return Err(tensor.fault("number of layers", format!("layer {n}"), expected));
            }
        }
    }
    Ok(())
}

fn find_vector<'a>(files: &'a Files, spec: &VectorSpec) -> Result<Tensor<'a>, WeightsError> {
    let shapes = spec.shapes();
    let Some(tensor) = files.tensor(&spec.name) else {
        return Err(missing_vector(files, &spec.name, &shapes[0]));
    };
    if !shapes.iter().any(|shape| shape == tensor.shape) {
        let expected: Vec<_> = shapes.iter().map(|dims| shape(dims)).collect();
        return Err(tensor.fault("shape", shape(tensor.shape), expected.join(" or ")));
    }
    if !matches!(tensor.dtype, Dtype::F32 | Dtype::F16 | Dtype::Bf16) {
        return Err(tensor.fault("dtype", tensor.dtype.name(), "F32, F16 or BF16"));
    }
    Ok(tensor)
}

/// The elements in f32, none of them NaN or infinite.
fn widen(tensor: Tensor) -> Result<Vec<f32>, WeightsError> {
    let bytes = tensor.read()?;
    let values: Vec<f32> = match tensor.dtype {
        Dtype::F32 => numbers(&bytes).into_owned(),
        Dtype::F16 => numbers(&bytes).iter().map(|&bits| f16_to_f32(bits)).collect(),
        Dtype::Bf16 => numbers(&bytes).iter().map(|&bits| bf16_to_f32(bits)).collect(),
        other => return Err(tensor.fault("dtype", other.name(), "F32, F16 or BF16")),
    };
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(tensor.fault("value", format!("{} at element {at}", values[at]), "finite numbers")),
    }
}

fn missing_vector(files: &Files, name: &str, dims: &[usize]) -> WeightsError {
    WeightsError::Missing { tensor: name.to_owned(), file: files.searched(), expected: shape(dims) }
}

fn not_in_geometry(name: &str, dims: &[usize]) -> WeightsError {
    WeightsError::Missing {
        tensor: name.to_owned(),
        file: "random weights of this geometry".to_owned(),
        expected: shape(dims),
    }
}

fn random_shape(name: &str, found: &[usize], expected: &[usize]) -> WeightsError {
    WeightsError::Tensor {
        tensor: name.to_owned(),
        file: "random weights".to_owned(),
        what: "shape",
        found: shape(found),
        expected: shape(expected),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_can_share_a_checkpoint() {
        fn shared<T: Send + Sync>() {}
        shared::<Checkpoint>();
        shared::<Matrix>();
    }
}
