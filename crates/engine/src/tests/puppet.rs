//! A model without arithmetic: what it draws is a hash of everything that should matter (the tokens in the pages,
//! the chunks and folds of the state, the sampling parameters) and it checks every batch against what its caches
//! hold. A page that two sequences write, a stale slot, a chunk at the wrong place or a wrong ring length changes
//! the text or is an error.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::time::Duration;

use qwill_device::batch::PAGE_TOKENS;
use qwill_device::sample::ScoreRow;
use qwill_device::{Batch, Phase, RING_TOKENS, SampleRow, Sampled, Span};
use qwill_model::MtpHidden;
use thiserror::Error;

use crate::StepModel;

#[derive(Debug, Error)]
#[error("{0}")]
pub(crate) struct PuppetError(String);

/// How long a call hangs.
const HANG: Duration = Duration::from_secs(5);

/// What goes wrong, and at which of the model's calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    ErrorAt(usize),
    /// From that call on, every call.
    ErrorsFrom(usize),
    PanicAt(usize),
    /// Takes far longer than a test waits.
    HangAt(usize),
    /// Draws a token outside the vocabulary.
    WildTokenAt(usize),
    /// Has no distribution for draws with this seed from this position on.
    UnsoundDraw {
        seed: u64,
        position: u64,
    },
    /// Has no distribution where this token is scored.
    UnsoundScore {
        token: u32,
    },
}

/// Rejected rows stay in the ring until rows that are right overwrite them.
#[derive(Debug, Clone, Default)]
struct State {
    base: u64,
    /// Tokens in the base.
    base_tokens: usize,
    ring: Vec<u32>,
}

/// Bytes of a granule: for each position of a page the trunk's token and the MTP module's.
pub(crate) const GRANULE_BYTES: usize = PAGE_TOKENS * 8;
/// A stored state has its base in one granule and its position in the other.
const STATE_GRANULES: usize = 2;

type Granule = [u8; GRANULE_BYTES];

/// A row of logits.
#[derive(Debug, Clone, Copy)]
enum Logits {
    Trunk(u64),
    /// Of the MTP module, which is told what to say.
    Draft(u32),
}

/// What a row leaves for the MTP module.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Hidden {
    /// A hash of the tokens up to the row's.
    Trunk(u64),
    /// Slot and position.
    Draft(usize, usize),
}

/// What the MTP module drafts after a text.
pub(crate) type Oracle = Box<dyn Fn(&[u32]) -> u32 + Send>;

pub(crate) struct Puppet {
    pages: Vec<[Option<u32>; PAGE_TOKENS]>,
    /// The MTP module's: at a position the token after it.
    mtp_pages: Vec<[Option<u32>; PAGE_TOKENS]>,
    slots: Vec<State>,
    /// The host store.
    pub(crate) host: Vec<Granule>,
    logits: Vec<Logits>,
    hidden: Vec<Hidden>,
    mtp_hidden: Vec<Hidden>,
    /// `None`: there is no MTP module.
    pub(crate) oracle: Option<Oracle>,
    max_rows: usize,
    max_logit_rows: usize,
    calls: usize,
    pub(crate) fault: Fault,
}

fn hash(value: impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Puppet {
    pub(crate) fn new(pages: usize, slots: usize, max_rows: usize, max_logit_rows: usize) -> Self {
        // Stale contents everywhere: nothing may depend on them.
        let stale = State { base: 99, base_tokens: 4, ring: vec![1] };
        Self {
            pages: vec![[Some(77); PAGE_TOKENS]; pages],
            mtp_pages: vec![[Some(78); PAGE_TOKENS]; pages],
            slots: vec![stale; slots],
            host: Vec::new(),
            logits: Vec::new(),
            hidden: Vec::new(),
            mtp_hidden: Vec::new(),
            oracle: None,
            max_rows,
            max_logit_rows,
            calls: 0,
            fault: Fault::None,
        }
    }

    /// Calls so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    fn call(&mut self) -> Result<(), PuppetError> {
        self.calls += 1;
        let at = self.calls;
        match self.fault {
            Fault::ErrorAt(call) if at == call => Err(PuppetError(format!("call {at} fails"))),
            Fault::ErrorsFrom(call) if at >= call => Err(PuppetError(format!("call {at} fails"))),
            Fault::PanicAt(call) if at == call => panic!("call {at} panics"),
            Fault::HangAt(call) if at == call => {
                std::thread::sleep(HANG);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn granule(&mut self, granule: u32) -> Result<&mut Granule, PuppetError> {
        let count = self.host.len();
        let outside = || PuppetError(format!("granule {granule} of {count}"));
        self.host.get_mut(granule as usize).ok_or_else(outside)
    }

    fn granule_word(&mut self, granule: u32) -> Result<u64, PuppetError> {
        let bytes = self.granule(granule)?.first_chunk().copied().unwrap_or_default();
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes a row's token into its page and hashes all keys that the row sees.
    fn attend(&mut self, batch: &Batch, span: &Span, row: usize) -> Result<u64, PuppetError> {
        let position = span.position + row;
        let (page, offset) = batch.place(span, position);
        self.pages[page][offset] = Some(batch.tokens[span.first_row + row]);
        let attended = hash(keys(&self.pages, batch, span, position)?);
        self.hidden.push(Hidden::Trunk(attended));
        Ok(attended)
    }

    /// A row of the MTP module: `source` must be what the trunk left at the row's position, or the module itself at the one
    /// before. Returns the token that it says.
    fn follow(&mut self, batch: &Batch, span: &Span, row: usize, source: Hidden) -> Result<u32, PuppetError> {
        let position = span.position + row;
        let expected = match source {
            Hidden::Trunk(_) => Hidden::Trunk(hash(keys(&self.pages, batch, span, position)?)),
            Hidden::Draft(..) => Hidden::Draft(span.slot, position - 1),
        };
        if source != expected {
            return Err(PuppetError(format!("{source:?} at {position} of {span:?}")));
        }
        let (page, offset) = batch.place(span, position);
        self.mtp_pages[page][offset] = Some(batch.tokens[span.first_row + row]);
        self.mtp_hidden.push(Hidden::Draft(span.slot, position));
        let first = keys(&self.pages, batch, span, 0)?;
        let text = [first, keys(&self.mtp_pages, batch, span, position)?].concat();
        Ok(self.oracle.as_ref().map_or(0, |oracle| oracle(&text)))
    }

    fn run_span(&mut self, batch: &Batch, index: usize) -> Result<Vec<u64>, PuppetError> {
        let span = &batch.spans[index];
        let mut state = self.slots[span.slot].clone();
        if state.base_tokens + span.ring_len != span.position || state.ring.len() < span.ring_len {
            return Err(PuppetError(format!("{span:?} on {state:?}")));
        }
        if batch.phase == Phase::Prefill && span.ring_len > 0 {
            return Err(PuppetError(format!("a prompt on a ring: {span:?}")));
        }
        state.ring.truncate(span.ring_len);
        let mut outputs = Vec::new();
        match batch.phase {
            Phase::Prefill => {
                for chunk in batch.chunks.iter().filter(|chunk| chunk.span == index) {
                    let tokens = &batch.tokens[chunk.first_row..chunk.first_row + chunk.rows];
                    for row in 0..chunk.rows {
                        let attended = self.attend(batch, span, chunk.first_row - span.first_row + row)?;
                        outputs.push(hash((attended, state.base, &tokens[..=row])));
                    }
                    state.base = hash((state.base, tokens));
                    state.base_tokens += tokens.len();
                }
            }
            Phase::Rows => {
                if state.ring.len() == RING_TOKENS {
                    state.base = hash((state.base, std::mem::take(&mut state.ring)));
                    state.base_tokens += RING_TOKENS;
                }
                for row in 0..span.rows {
                    state.ring.push(batch.tokens[span.first_row + row]);
                    let attended = self.attend(batch, span, row)?;
                    outputs.push(hash((attended, state.base, &state.ring)));
                }
            }
        }
        self.slots[span.slot] = state;
        Ok(outputs)
    }
}

/// What the pages of a span hold up to a position.
fn keys(
    pages: &[[Option<u32>; PAGE_TOKENS]],
    batch: &Batch,
    span: &Span,
    position: usize,
) -> Result<Vec<u32>, PuppetError> {
    let key = |position| {
        let (page, offset) = batch.place(span, position);
        pages[page][offset]
    };
    let keys: Option<Vec<u32>> = (0..=position).map(key).collect();
    keys.ok_or_else(|| PuppetError(format!("a hole before {position}")))
}

fn logprobs(logits: u64, token: u32, top: usize) -> (f32, Vec<(u32, f32)>) {
    let one = |token: u32| -((hash((logits, token)) % 10_000) as f32) / 1000.0;
    (one(token), (0..top as u32).map(|token| (token, one(token))).collect())
}

impl StepModel for Puppet {
    type Error = PuppetError;

    fn forward(&mut self, batch: &Batch, logit_rows: &[usize]) -> Result<(), PuppetError> {
        self.call()?;
        batch.check().map_err(PuppetError)?;
        if batch.rows() > self.max_rows || logit_rows.len() > self.max_logit_rows {
            return Err(PuppetError(format!("{} rows, {} with logits", batch.rows(), logit_rows.len())));
        }
        let mut outputs = Vec::new();
        self.hidden.clear();
        for index in 0..batch.spans.len() {
            outputs.extend(self.run_span(batch, index)?);
        }
        self.logits = logit_rows.iter().map(|row| Logits::Trunk(outputs[*row])).collect();
        Ok(())
    }

    fn has_mtp(&self) -> bool {
        self.oracle.is_some()
    }

    fn mtp(&mut self, batch: &Batch, hidden: MtpHidden<'_>, logit_rows: &[usize]) -> Result<(), PuppetError> {
        self.call()?;
        batch.check().map_err(PuppetError)?;
        if batch.rows() > self.max_rows || logit_rows.len() > self.max_logit_rows {
            return Err(PuppetError(format!("{} rows, {} with logits", batch.rows(), logit_rows.len())));
        }
        let sources: Vec<Hidden> = match hidden {
            MtpHidden::Trunk(rows) => rows.iter().map(|row| self.hidden[*row]).collect(),
            MtpHidden::Draft(rows) => rows.iter().map(|row| self.mtp_hidden[*row]).collect(),
        };
        self.mtp_hidden.clear();
        let mut outputs = Vec::new();
        for span in &batch.spans {
            for row in 0..span.rows {
                outputs.push(self.follow(batch, span, row, sources[outputs.len()])?);
            }
        }
        if !logit_rows.is_empty() {
            self.logits = logit_rows.iter().map(|row| Logits::Draft(outputs[*row])).collect();
        }
        Ok(())
    }

    fn sample(&mut self, rows: &[SampleRow<'_>]) -> Result<Vec<Sampled>, PuppetError> {
        self.call()?;
        let wild = self.fault == Fault::WildTokenAt(self.calls);
        let draw = |row: &SampleRow<'_>| {
            let logits = match self.logits[row.logits_row] {
                Logits::Trunk(logits) => logits,
                Logits::Draft(token) => return Sampled { token, logprob: f32::NAN, top: Vec::new() },
            };
            if matches!(self.fault, Fault::UnsoundDraw { seed, position } if seed == row.seed && position <= row.position)
            {
                return Sampled::unsound();
            }
            let noise = if row.temperature > 0.0 { Some((row.seed, row.position)) } else { None };
            let filters = (row.top_k, row.top_p.to_bits(), row.min_p.to_bits(), row.temperature.to_bits());
            let penalties =
                [row.presence_penalty, row.frequency_penalty, row.repetition_penalty].map(f32::to_bits);
            let bias: Vec<(u32, u32)> =
                row.bias.iter().map(|(token, bias)| (*token, bias.to_bits())).collect();
            let key = hash((logits, noise, filters, penalties, row.seen, bias));
            let limit = row.vocab_limit as u64;
            let mut tokens =
                (0..limit).map(|step| ((key + step) % limit) as u32).filter(|token| row.is_in_mask(*token));
            let first = tokens.clone().next();
            let token = tokens.find(|token| !row.banned.contains(token)).or(first);
            let token = if wild { row.vocab_limit as u32 } else { token.unwrap_or(0) };
            match row.top_logprobs {
                Some(top) => {
                    let (logprob, top) = logprobs(logits, token, top);
                    Sampled { token, logprob, top }
                }
                None => Sampled { token, logprob: f32::NAN, top: Vec::new() },
            }
        };
        Ok(rows.iter().map(draw).collect())
    }

    fn wait(&mut self) -> Result<(), PuppetError> {
        Ok(())
    }

    fn score(&mut self, rows: &[ScoreRow]) -> Result<Vec<Sampled>, PuppetError> {
        self.call()?;
        let score = |row: &ScoreRow| {
            let Logits::Trunk(logits) = self.logits[row.logits_row] else {
                return Err(PuppetError("a score of a draft's logits".to_owned()));
            };
            if self.fault == (Fault::UnsoundScore { token: row.token }) {
                return Ok(Sampled::unsound());
            }
            let (logprob, top) = logprobs(logits, row.token, row.top_logprobs);
            Ok(Sampled { token: row.token, logprob, top })
        };
        rows.iter().map(score).collect()
    }

    fn clear_slot(&mut self, slot: usize) -> Result<(), PuppetError> {
        self.call()?;
        self.slots[slot] = State::default();
        Ok(())
    }

    fn copy_slot(&mut self, from: usize, to: usize) -> Result<(), PuppetError> {
        self.call()?;
        self.slots[to] = self.slots[from].clone();
        Ok(())
    }

    fn copy_page(&mut self, from: usize, to: usize) -> Result<(), PuppetError> {
        self.call()?;
        self.pages[to] = self.pages[from];
        self.mtp_pages[to] = self.mtp_pages[from];
        Ok(())
    }

    fn host_granules(&self) -> usize {
        self.host.len()
    }

    fn state_granules(&self) -> usize {
        STATE_GRANULES
    }

    fn store_page(&mut self, page: usize, granule: u32) -> Result<(), PuppetError> {
        self.call()?;
        let word = |token: &Option<u32>| token.map_or(0, |token| token << 1 | 1);
        let tokens = self.pages[page]
            .iter()
            .zip(&self.mtp_pages[page])
            .flat_map(|(of_trunk, of_mtp)| [of_trunk, of_mtp]);
        let bytes: Vec<u8> = tokens.map(word).flat_map(u32::to_le_bytes).collect();
        self.granule(granule)?.copy_from_slice(&bytes);
        Ok(())
    }

    fn load_page(&mut self, page: usize, granule: u32) -> Result<(), PuppetError> {
        self.call()?;
        let granule = *self.granule(granule)?;
        let token = |bytes: &[u8; 4]| {
            let word = u32::from_le_bytes(*bytes);
            (word & 1 == 1).then_some(word >> 1)
        };
        for (at, [of_trunk, of_mtp]) in granule.as_chunks().0.as_chunks().0.iter().enumerate() {
            self.pages[page][at] = token(of_trunk);
            self.mtp_pages[page][at] = token(of_mtp);
        }
        Ok(())
    }

    fn store_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), PuppetError> {
        self.call()?;
        let State { base, base_tokens, ring } = self.slots[slot].clone();
        if !ring.is_empty() || position != base_tokens {
            let ring = ring.len();
            return Err(PuppetError(format!("slot {slot} stands at {base_tokens} with a ring of {ring}")));
        }
        let [of_base, of_position] = state_granules(granules)?;
        self.granule(of_base)?[..8].copy_from_slice(&base.to_le_bytes());
        self.granule(of_position)?[..8].copy_from_slice(&(position as u64).to_le_bytes());
        Ok(())
    }

    fn load_state(&mut self, slot: usize, position: usize, granules: &[u32]) -> Result<(), PuppetError> {
        self.call()?;
        let [of_base, of_position] = state_granules(granules)?;
        let base = self.granule_word(of_base)?;
        let stored_at = self.granule_word(of_position)?;
        if stored_at != position as u64 {
            return Err(PuppetError(format!("a state stored at {stored_at}, loaded at {position}")));
        }
        self.slots[slot] = State { base, base_tokens: position, ring: Vec::new() };
        Ok(())
    }

    fn stored(&mut self) -> Result<bool, PuppetError> {
        self.call()?;
        Ok(true)
    }

    fn read_granule(&mut self, granule: u32) -> Result<&[u8], PuppetError> {
        self.call()?;
        Ok(&self.granule(granule)?[..])
    }

    fn write_granule(&mut self, granule: u32, bytes: &[u8]) -> Result<(), PuppetError> {
        self.call()?;
        self.granule(granule)?.copy_from_slice(bytes);
        Ok(())
    }
}

fn state_granules(granules: &[u32]) -> Result<[u32; STATE_GRANULES], PuppetError> {
    granules.try_into().map_err(|_| PuppetError(format!("a state in {} granules", granules.len())))
}
