//! From a request's sampling parameters to what the device's sampler needs, and back to events.

use qwill_contract::{Request, SamplingParams, TokenLogprobs, TokenOut};
use qwill_device::{SampleRow, Sampled};

use crate::sequence::{EndRule, Sequence};

/// The draw of a sequence's next token from a row of logits.
pub(crate) fn sample_row<'a>(
    request: &'a Request,
    rule: &'a EndRule,
    sequence: &'a Sequence,
    logits_row: usize,
    vocab_limit: usize,
) -> SampleRow<'a> {
    let SamplingParams { temperature, top_p, top_k, min_p, logprobs, .. } = request.sampling;
    SampleRow {
        logits_row,
        temperature,
        top_k,
        top_p,
        min_p,
        presence_penalty: request.sampling.presence_penalty,
        frequency_penalty: request.sampling.frequency_penalty,
        repetition_penalty: request.sampling.repetition_penalty,
        seen: sequence.seen.counts(),
        bias: &request.sampling.logit_bias,
        banned: if sequence.generated < rule.min_tokens { &rule.stop_ids } else { &[] },
        vocab_limit,
        seed: sequence.seed,
        position: sequence.draw_position(),
        top_logprobs: logprobs,
    }
}

/// A drawn token as the client sees it.
pub(crate) fn token_out(sampled: Sampled, sampling: &SamplingParams) -> TokenOut {
    let logprobs = sampling.logprobs.map(|_| TokenLogprobs { logprob: sampled.logprob, top: sampled.top });
    TokenOut { id: sampled.token, logprobs }
}
