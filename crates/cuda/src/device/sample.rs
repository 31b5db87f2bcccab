//! Sampling and scoring on the device in two launches; the last few log-probabilities on the host.

use std::cmp::Ordering;
use std::sync::Arc;

use qwill_device::{DeviceError, SampleRow, Sampled, ScoreRow};

use super::{Check, CudaBuffer, CudaDevice, Scratch};
use crate::driver::{Driver, Extent, Function, Module};
use crate::launch::SampleParams;
use crate::pinned::Pinned;

/// Rows of a launch at most: bounds the memory for copies of logits.
const LAUNCH_ROWS: usize = 16;
/// Rows whose results are waited for together, at most.
const BATCH_ROWS: usize = 512;
/// As `BLOCK`, `TILE`, `TILES_BLOCK` and `BLOCK_TILES` in the source.
const BLOCK: usize = 512;
const TILE: usize = 128;
const TILES_BLOCK: usize = 256;
const BLOCK_TILES: usize = 32;
/// Bytes of parameters: 1,024 ids to penalise in each of 512 rows, masks of 248,320 ids in 134 of them. Rows that need more
/// go in several batches; only one whose own lists are longer makes the memory grow.
const REQUEST_BYTES: u64 = 4 << 20;
/// Bytes of results: 512 rows with 60 alternatives each.
const RESULT_BYTES: u64 = 256 << 10;
const UNSOUND: u32 = u32::MAX;
const FLAG_DRAW: u32 = 1;
const FLAG_REPORT: u32 = 2;
/// 32-bit words of `struct SampleRow` and `struct SampleResult` in the source.
const ROW_WORDS: usize = 28;
const RESULT_WORDS: usize = 6;

/// Entry points of sample.cu.
#[derive(Debug)]
pub(super) struct SampleKernels {
    tiles: Function,
    sample: Function,
}

impl SampleKernels {
    pub(super) fn new(module: &Arc<Module>) -> Result<Self, DeviceError> {
        Ok(Self { tiles: module.function("tiles", 0)?, sample: module.early_function("sample", 0)? })
    }
}

/// Where a launch's rows have their copies, and the largest logits and the sums of their tiles.
#[derive(Debug, Clone, Copy)]
struct TileMemory {
    tiles: usize,
    adjusted_bytes: u64,
    maxima_bytes: u64,
    bytes: u64,
}

impl TileMemory {
    fn of(vocab: usize) -> Self {
        let tiles = vocab.div_ceil(TILE);
        let adjusted_bytes = (LAUNCH_ROWS * vocab * 4).next_multiple_of(256) as u64;
        let maxima_bytes = (LAUNCH_ROWS * 2 * tiles * 4).next_multiple_of(256) as u64;
        let bytes = adjusted_bytes + maxima_bytes + (LAUNCH_ROWS * tiles * 8) as u64;
        Self { tiles, adjusted_bytes, maxima_bytes, bytes }
    }
}

/// Memory of the sampler. Parameters and results that are larger than usual make it grow.
#[derive(Debug)]
pub(super) struct SamplerMemory {
    logits: Scratch,
    request: Scratch,
    results: Scratch,
    pinned: Option<(Pinned, Pinned)>,
}

impl Default for SamplerMemory {
    fn default() -> Self {
        Self {
            logits: Scratch::new("copies of logits"),
            request: Scratch::new("sampling parameters"),
            results: Scratch::new("sampling results"),
            pinned: None,
        }
    }
}

impl SamplerMemory {
    /// Bytes that [`SamplerMemory::reserve`] takes.
    pub(super) fn bytes(vocab: usize) -> u64 {
        TileMemory::of(vocab).bytes + REQUEST_BYTES + RESULT_BYTES
    }

    /// Makes room for rows of a vocabulary with lists and results of a usual length.
    pub(super) fn reserve(&mut self, driver: &Arc<Driver>, vocab: usize) -> Result<(), DeviceError> {
        self.logits.at_least(driver, TileMemory::of(vocab).bytes)?;
        self.request.at_least(driver, REQUEST_BYTES)?;
        self.results.at_least(driver, RESULT_BYTES)?;
        let request = Pinned::new(driver, REQUEST_BYTES as usize / 4)?;
        self.pinned = Some((request, Pinned::new(driver, RESULT_BYTES as usize / 4)?));
        Ok(())
    }

    /// Uploads parameters, made by `words` for the address where they will be; returns that.
    fn send(
        &mut self,
        check: Check,
        driver: &Arc<Driver>,
        len: usize,
        words: impl FnOnce(u64) -> Vec<u32>,
    ) -> Result<u64, DeviceError> {
        let memory = self.request.at_least(driver, (len as u64 * 4).max(REQUEST_BYTES))?;
        let words = words(memory.address());
        match &mut self.pinned {
            Some((pinned, _)) if words.len() as u64 * 4 <= REQUEST_BYTES => {
                pinned.send(check.0, &words, memory)?;
            }
            _ => memory.write(check.0, 0, &words)?,
        }
        Ok(memory.address())
    }

    /// Waits for the first `len` words of the results.
    fn receive(&mut self, check: Check, driver: &Arc<Driver>, len: usize) -> Result<Vec<u32>, DeviceError> {
        let memory = self.results.at_least(driver, RESULT_BYTES)?;
        match &mut self.pinned {
            Some((_, pinned)) if len as u64 * 4 <= RESULT_BYTES => {
                Ok(pinned.receive(check.0, memory, len)?.to_vec())
            }
            _ => memory.read(check.0, 0, len),
        }
    }
}

/// One row for the kernel; a row to score has everything else off.
struct Request<'a> {
    row: SampleRow<'a>,
    /// The token to score; `None` draws one.
    token: Option<u32>,
}

impl CudaDevice {
    pub(super) fn run_sample(
        &mut self,
        logits: &CudaBuffer,
        rows: &[SampleRow<'_>],
    ) -> Result<Vec<Sampled>, DeviceError> {
        let requests: Vec<Request<'_>> =
            rows.iter().map(|row| Request { row: row.clone(), token: None }).collect();
        self.run_requests(Check("sample"), logits, &requests)
    }

    pub(super) fn run_score(
        &mut self,
        logits: &CudaBuffer,
        rows: &[ScoreRow],
    ) -> Result<Vec<Sampled>, DeviceError> {
        let request = |row: &ScoreRow| {
            let greedy = SampleRow::greedy(row.logits_row, row.vocab_limit);
            Request {
                row: SampleRow { top_logprobs: Some(row.top_logprobs), ..greedy },
                token: Some(row.token),
            }
        };
        let requests: Vec<Request<'_>> = rows.iter().map(request).collect();
        self.run_requests(Check("score"), logits, &requests)
    }

    fn run_requests(
        &mut self,
        check: Check,
        logits: &CudaBuffer,
        requests: &[Request<'_>],
    ) -> Result<Vec<Sampled>, DeviceError> {
        let indices: Vec<usize> = requests.iter().map(|request| request.row.logits_row).collect();
        check.full("logits", logits)?;
        check.gathered("logits", &indices, logits)?;
        let mut sampled = Vec::with_capacity(requests.len());
        let mut rest = requests;
        while !rest.is_empty() {
            let (batch, later) = rest.split_at(batch_rows(rest));
            sampled.extend(self.run_batch(check, logits, batch)?);
            rest = later;
        }
        Ok(sampled)
    }

    /// As many launches as the memory for copies makes necessary, then one wait for all their results.
    fn run_batch(
        &mut self,
        check: Check,
        logits: &CudaBuffer,
        requests: &[Request<'_>],
    ) -> Result<Vec<Sampled>, DeviceError> {
        let len: usize = requests.iter().map(|request| row_words(&request.row)).sum();
        let words = |address| request_words(requests, address);
        let rows = self.sampler.send(check, &self.driver, len, words)?;
        let top_capacity =
            requests.iter().map(|request| request.row.top_logprobs.unwrap_or(0)).max().unwrap_or(0);
        let top_capacity = top_capacity.min(logits.cols);
        let result_words = requests.len() * (RESULT_WORDS + 2 * top_capacity);
        let results = self
            .sampler
            .results
            .at_least(&self.driver, (result_words as u64 * 4).max(RESULT_BYTES))?
            .address();
        let memory = TileMemory::of(logits.cols);
        let adjusted = self.sampler.logits.at_least(&self.driver, memory.bytes)?.address();
        let top = results + (requests.len() * RESULT_WORDS * 4) as u64;
        for (index, requests) in requests.chunks(LAUNCH_ROWS).enumerate() {
            let first = (index * LAUNCH_ROWS) as u64;
            let params = SampleParams {
                logits: logits.memory.address(),
                adjusted,
                maxima: adjusted + memory.adjusted_bytes,
                sums: adjusted + memory.adjusted_bytes + memory.maxima_bytes,
                rows: rows + first * ROW_WORDS as u64 * 4,
                results: results + first * RESULT_WORDS as u64 * 4,
                top: top + first * top_capacity as u64 * 8,
                logits_cols: logits.cols as u32,
                tiles: memory.tiles as u32,
                top_capacity: top_capacity as u32,
                unused: 0,
            };
            let kernels = &self.kernels.sample;
            let blocks = (memory.tiles.div_ceil(BLOCK_TILES), requests.len(), 1);
            self.driver.launch(check.0, &kernels.tiles, Extent::new(blocks, TILES_BLOCK), &params)?;
            let extent = Extent::new((requests.len(), 1, 1), BLOCK);
            self.driver.launch(check.0, &kernels.sample, extent, &params)?;
        }
        let words = self.sampler.receive(check, &self.driver, result_words)?;
        Ok(read_results(&words, requests, top_capacity))
    }
}

/// Rows, at least one, whose parameters fit the memory for them.
fn batch_rows(requests: &[Request<'_>]) -> usize {
    let mut words = 0;
    let fits = |request: &&Request<'_>| {
        words += row_words(&request.row);
        words as u64 * 4 <= REQUEST_BYTES
    };
    requests.iter().take(BATCH_ROWS).take_while(fits).count().max(1)
}

/// Words of a row with its lists.
fn row_words(row: &SampleRow<'_>) -> usize {
    let mask = row.mask.map_or(0, |_| mask_words(row));
    ROW_WORDS + 2 * row.seen.len() + 2 * row.bias.len() + row.banned.len() + mask
}

/// Words of a mask: a bit for each id below the limit.
fn mask_words(row: &SampleRow<'_>) -> usize {
    row.vocab_limit.div_ceil(32)
}

/// The rows as `struct SampleRow`, then their lists; `address` is where all this will be.
fn request_words(requests: &[Request<'_>], address: u64) -> Vec<u32> {
    let mut lists: Vec<u32> = Vec::new();
    let mut words: Vec<u32> = Vec::new();
    let wide = |value: u64| [value as u32, (value >> 32) as u32];
    let lists_at = address + (requests.len() * ROW_WORDS * 4) as u64;
    for Request { row, token } in requests {
        let place = |lists: &Vec<u32>| lists_at + lists.len() as u64 * 4;
        words.extend(wide(row.seed));
        words.extend(wide(row.position));
        words.extend(wide(place(&lists)));
        lists.extend(row.seen.iter().flat_map(|(id, occurrences)| [*id, *occurrences]));
        words.extend(wide(place(&lists)));
        lists.extend(row.bias.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]));
        words.extend(wide(place(&lists)));
        lists.extend_from_slice(row.banned);
        words.extend(wide(row.mask.map_or(0, |_| place(&lists))));
        if let Some(mask) = row.mask {
            let absent = std::iter::repeat(&0);
            lists.extend(mask.iter().chain(absent).take(mask_words(row)));
        }
        let draw = if token.is_none() { FLAG_DRAW } else { 0 };
        let report = if row.top_logprobs.is_some() { FLAG_REPORT } else { 0 };
        let counts = [
            row.seen.len(),
            row.bias.len(),
            row.banned.len(),
            row.logits_row,
            row.vocab_limit,
            row.top_k,
            row.top_logprobs.unwrap_or(0),
        ];
        words.extend(counts.map(|count| u32::try_from(count).unwrap_or(u32::MAX)));
        words.push(draw | report);
        let numbers = [
            row.temperature,
            row.top_p,
            row.min_p,
            row.presence_penalty,
            row.frequency_penalty,
            row.repetition_penalty,
        ];
        words.extend(numbers.map(f32::to_bits));
        words.extend([token.unwrap_or(0), 0]);
    }
    words.extend(lists);
    words
}

fn read_results(words: &[u32], requests: &[Request<'_>], top_capacity: usize) -> Vec<Sampled> {
    let (results, tops) = words.split_at(requests.len() * RESULT_WORDS);
    let rows = requests.iter().zip(results.chunks(RESULT_WORDS)).enumerate();
    let sampled = rows.map(|(index, (request, result))| {
        let token = result[2];
        if token == UNSOUND {
            return Sampled::unsound();
        }
        if request.row.top_logprobs.is_none() {
            return Sampled { token, logprob: f32::NAN, top: Vec::new() };
        }
        let total = f64::from_bits(u64::from(result[0]) | u64::from(result[1]) << 32);
        let largest = f32::from_bits(result[4]);
        let logprob = |logit: f32| (f64::from(logit) - f64::from(largest) - total.ln()) as f32;
        let top = &tops[index * 2 * top_capacity..][..2 * (result[5] as usize).min(top_capacity)];
        let mut top: Vec<(u32, f32)> = top.chunks(2).map(|pair| (pair[0], f32::from_bits(pair[1]))).collect();
        top.sort_unstable_by(|a, b| b.1.partial_cmp(&a.1).unwrap_or(Ordering::Equal).then(a.0.cmp(&b.0)));
        let in_vocab = (token as usize) < request.row.vocab_limit;
        Sampled {
            token,
            logprob: if in_vocab { logprob(f32::from_bits(result[3])) } else { f32::NEG_INFINITY },
            top: top.into_iter().map(|(token, logit)| (token, logprob(logit))).collect(),
        }
    });
    sampled.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_the_kernels_size_and_point_at_their_lists() {
        let row = SampleRow {
            mask: Some(&[21, 22]),
            seen: &[(7, 1), (9, 2)],
            bias: &[(3, 0.5)],
            banned: &[11],
            ..SampleRow::greedy(4, 100)
        };
        let requests = [Request { row: row.clone(), token: None }, Request { row, token: Some(5) }];
        let words = request_words(&requests, 1 << 40);
        assert_eq!(words.len(), 2 * (ROW_WORDS + 7 + 4), "100 ids are 4 words of a mask");
        let list = |row: usize, field: usize| {
            let word = row * ROW_WORDS + field;
            let address = u64::from(words[word]) | u64::from(words[word + 1]) << 32;
            words[(address - (1 << 40)) as usize / 4]
        };
        assert_eq!([list(0, 4), list(0, 6), list(0, 8), list(0, 10)], [7, 3, 11, 21]);
        assert_eq!([list(1, 4), list(1, 6), list(1, 8), list(1, 10)], [7, 3, 11, 21]);
        assert_eq!(words[words.len() - 4..], [21, 22, 0, 0]);
        assert_eq!(words[ROW_WORDS - 9], FLAG_DRAW);
        assert_eq!(words[2 * ROW_WORDS - 2], 5);
    }

    #[test]
    fn batches_hold_what_fits_the_memory() {
        let mask = vec![u32::MAX; 7760];
        let masked = SampleRow { mask: Some(&mask), ..SampleRow::greedy(0, 248_320) };
        let requests = |row: &SampleRow<'static>, count| -> Vec<Request<'static>> {
            (0..count).map(|_| Request { row: row.clone(), token: None }).collect()
        };
        assert_eq!(batch_rows(&requests(&SampleRow::greedy(0, 248_320), 600)), BATCH_ROWS);
        let all: Vec<Request<'_>> = (0..200).map(|_| Request { row: masked.clone(), token: None }).collect();
        let rows = batch_rows(&all);
        assert!((64..=134).contains(&rows), "{rows}");
        let words: usize = all[..rows].iter().map(|request| row_words(&request.row)).sum();
        assert!(words as u64 * 4 <= REQUEST_BYTES);
        let seen = vec![(1, 1); 600_000];
        let long = SampleRow { seen: &seen, ..SampleRow::greedy(0, 248_320) };
        assert_eq!(batch_rows(&[Request { row: long, token: None }]), 1);
    }
}
