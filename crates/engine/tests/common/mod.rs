//! Engines on the tiny model, and requests with real text.

#[path = "../../src/tests/client.rs"]
pub(crate) mod client;
pub(crate) mod company;
pub(crate) mod prompts;

use std::path::PathBuf;

use qwill_contract::{EngineHandle, Request, SamplingParams};
use qwill_cpu::fast::CpuOptions;
use qwill_cpu::{CpuDevice, ReferenceDevice};
use qwill_cuda::{CudaDevice, CudaOptions};
use qwill_device::{Activations, Device, DeviceError, KvType, StateType};
use qwill_engine::speculation::{MAX_DRAFTS, SpecMode, SpeculationOptions};
use qwill_engine::{DEFAULT_MAX_STALL, DiskCacheOptions, EngineError, EngineOptions, EngineThread, start};
use qwill_model::{Model, ModelOptions};
use qwill_weights::{Checkpoint, Quantize};
use serde_json::Value;

/// Rows of the tiny model's vocabulary; all have text.
pub(crate) const VOCAB: usize = 8192;

/// The repository; `QWILL_REPOSITORY` says where it is on a machine other than the one that built this.
pub(crate) fn repository() -> PathBuf {
    let built_in = || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..");
    std::env::var_os("QWILL_REPOSITORY").map_or_else(built_in, PathBuf::from)
}

/// A file of the golden data, one JSON value a line.
pub(crate) fn golden_lines(name: &str) -> Vec<Value> {
    let text = std::fs::read_to_string(repository().join("golden").join(name)).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A JSON file of the golden data.
pub(crate) fn golden(name: &str) -> Value {
    serde_json::from_slice(&std::fs::read(repository().join("golden").join(name)).unwrap()).unwrap()
}

/// An array of i32 of a safetensors file of the golden data.
pub(crate) fn golden_ints(file: &str, name: &str) -> Vec<u32> {
    let bytes = std::fs::read(repository().join("golden").join(file)).unwrap();
    let header_len = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let (header, data) = bytes[8..].split_at(header_len);
    let header: Value = serde_json::from_slice(header).unwrap();
    assert_eq!(header[name]["dtype"], "I32");
    let range = ids(&header[name]["data_offsets"]);
    let words = data[range[0] as usize..range[1] as usize].as_chunks().0.iter();
    words.map(|word| u32::from_le_bytes(*word)).collect()
}

/// An array of ids.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// How to run the tiny model.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Setup {
    pub(crate) quantize: Quantize,
    pub(crate) kv_type: KvType,
    pub(crate) state_type: StateType,
    pub(crate) slice: usize,
    pub(crate) sequences: usize,
    pub(crate) pages: usize,
    pub(crate) spec: SpecMode,
    pub(crate) draft_len: usize,
    pub(crate) adaptive: bool,
    /// Granules of the host store.
    pub(crate) host_granules: usize,
    pub(crate) prefix_cache: bool,
}

impl Setup {
    pub(crate) fn f32() -> Self {
        let (quantize, kv_type, state_type) = (Quantize::None, KvType::F32, StateType::F32);
        let (spec, draft_len, adaptive) = (SpecMode::Auto, MAX_DRAFTS, true);
        Self {
            quantize,
            kv_type,
            state_type,
            slice: 256,
            sequences: 16,
            pages: 128,
            spec,
            draft_len,
            adaptive,
            host_granules: 192,
            prefix_cache: true,
        }
    }

    /// Weights rounded at load, keys and values in bf16.
    pub(crate) fn rounded(quantize: Quantize) -> Self {
        Self { quantize, kv_type: KvType::Bf16, ..Self::f32() }
    }

    pub(crate) fn int4() -> Self {
        Self::rounded(Quantize::Int4)
    }

    pub(crate) fn int8_kv() -> Self {
        Self { kv_type: KvType::Int8, ..Self::int4() }
    }

    fn engine_options(self) -> EngineOptions {
        EngineOptions {
            model_names: vec!["tiny".into()],
            numerics: format!("{:?} {:?}", self.quantize, self.kv_type),
            eos_token_ids: vec![8166, 8168],
            vocab_limit: VOCAB,
            max_sequences: self.sequences,
            pages: self.pages,
            max_context_tokens: 1024,
            max_rows: self.slice.max(self.sequences),
            max_logit_rows: 64,
            prefill_slice_tokens: self.slice,
            max_stall: DEFAULT_MAX_STALL,
            queue_capacity: 4096,
            chunk_boundary_token: Some(8167),
            chunk_interval_tokens: 1024,
            speculation: SpeculationOptions {
                mode: self.spec,
                max_draft_len: self.draft_len,
                adaptive: self.adaptive,
                ..SpeculationOptions::default()
            },
            prefix_cache: self.prefix_cache,
            disk_cache: None,
            snapshot_interval_tokens: 256,
        }
    }

    /// Starts an engine on a device and waits until it is ready.
    pub(crate) fn start<D: Device>(
        self,
        device: impl FnOnce() -> Result<D, DeviceError> + Send + 'static,
    ) -> (EngineHandle, EngineThread) {
        self.start_with_disk(None, device)
    }

    /// The same with a disk.
    pub(crate) fn start_with_disk<D: Device>(
        self,
        disk_cache: Option<DiskCacheOptions>,
        device: impl FnOnce() -> Result<D, DeviceError> + Send + 'static,
    ) -> (EngineHandle, EngineThread) {
        let options = EngineOptions { disk_cache, ..self.engine_options() };
        let model_options = ModelOptions {
            quantize: self.quantize,
            kv_type: self.kv_type,
            state_type: self.state_type,
            pages: options.pages,
            slots: options.max_sequences,
            host_granules: self.host_granules,
            max_rows: options.max_rows,
            max_logit_rows: options.max_logit_rows,
        };
        let build = move || {
            let checkpoint = Checkpoint::open(&repository().join("models/tiny")).unwrap();
            Model::load(device().unwrap(), &checkpoint, &model_options, &mut |_| {})
        };
        let (handle, thread): (EngineHandle, EngineThread) = start(options, build).unwrap();
        let ready: Result<(), EngineError> = thread.wait_ready();
        ready.unwrap();
        (handle, thread)
    }
}

pub(crate) fn fast(activations: Activations) -> Result<CpuDevice, DeviceError> {
    CpuDevice::new(CpuOptions::new(2, activations))
}

#[expect(clippy::unnecessary_wraps, reason = "the other devices can fail to start")]
pub(crate) fn reference() -> Result<ReferenceDevice, DeviceError> {
    Ok(ReferenceDevice::new(Activations::F32))
}

/// Opens the first GPU; `None`, with the reason printed, where there is none and `QWILL_REQUIRE_GPU` is not set.
pub(crate) fn gpu() -> Option<fn() -> Result<CudaDevice, DeviceError>> {
    match open_gpu() {
        Ok(_) => Some(open_gpu),
        Err(error) if std::env::var_os("QWILL_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

fn open_gpu() -> Result<CudaDevice, DeviceError> {
    let options = CudaOptions::from_environment();
    CudaDevice::new(&options)
}

/// Greedy, without end-of-turn.
pub(crate) fn greedy(max_tokens: usize) -> SamplingParams {
    SamplingParams { max_tokens, ignore_eos: true, logprobs: Some(2), ..SamplingParams::default() }
}

/// Everything the sampler can do.
pub(crate) fn seasoned(max_tokens: usize, seed: u64) -> SamplingParams {
    SamplingParams {
        temperature: 1.0,
        top_p: 0.9,
        top_k: 40,
        min_p: 0.01,
        presence_penalty: 0.3,
        frequency_penalty: 0.2,
        repetition_penalty: 1.1,
        logit_bias: vec![(266, -2.0), (332, 1.5)],
        seed,
        min_tokens: 4,
        stop_token_ids: vec![13],
        ..greedy(max_tokens)
    }
}

/// The beginning of a text of the golden data.
pub(crate) fn text(perplexity: &Value, window: usize, tokens: usize) -> Vec<u32> {
    let mut text = ids(&perplexity["windows"][window]["ids"]);
    text.truncate(tokens);
    text
}

/// Requests whose answers must not depend on anything else. `scale` divides their lengths, for slow devices.
pub(crate) fn subjects(scale: usize) -> Vec<Request> {
    let perplexity = golden("perplexity.json");
    let text = |window, tokens: usize| text(&perplexity, window, tokens / scale);
    let chat = ids(&golden_lines("behaviour.jsonl")[4]["prompt_ids"]);
    // Messages of several lengths, so that chunks begin at odd places.
    let talk = [&chat[..], &text(0, 90)[..], &chat[..], &text(1, 40)[..], &chat[..]].concat();
    let new = |tokens: usize| tokens / scale;
    let plain = client::request(&text(2, 100), greedy(new(80)));
    let hot = client::request(&text(3, 330), seasoned(new(40), 11));
    let choices = Request { choices: 3, ..client::request(&talk, seasoned(new(40), 5)) };
    let echo = Request { prompt_logprobs: Some(2), ..client::request(&text(4, 150), greedy(new(4))) };
    let short = client::request(&chat, SamplingParams { ignore_eos: false, ..greedy(new(60)) });
    let page = client::request(&text(5, 64 * scale), seasoned(new(70), u64::MAX));
    vec![plain, hot, choices, echo, short, page]
}
