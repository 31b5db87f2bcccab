//! Turns the tokens of one choice into the text of its answer.

use std::sync::Arc;

use qwill_contract::{TokenLogprobs, TokenOut};
use qwill_text::{AnswerParser, CallPiece, Detokenizer, OfferedTool, Piece, StopMatcher, Tokenizer};

use crate::params::OutputRules;
use crate::prompt::Prompt;
use crate::random::random_id;
use crate::thinking::ShownThinking;
use crate::tools::ToolSettings;

/// A token of the answer, for log-probabilities and ids.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AnswerToken {
    pub(crate) id: u32,
    /// Where its text begins, in characters of the generated text.
    pub(crate) offset_chars: usize,
    /// Whether it is part of the thinking, its end included.
    pub(crate) thinking: bool,
    pub(crate) logprobs: Option<TokenLogprobs>,
}

/// What some tokens added to an answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Delta {
    pub(crate) reasoning: String,
    pub(crate) content: String,
    /// Parts of tool calls in order, at most one for each call.
    pub(crate) tool_calls: Vec<ToolCallDelta>,
    pub(crate) tokens: Vec<AnswerToken>,
}

/// The next part of a tool call. The parts of one call together are a JSON object in `arguments`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolCallDelta {
    /// Which call of the answer this is, from 0.
    pub(crate) index: usize,
    /// In the first part of a call only.
    pub(crate) begin: Option<ToolCallBegin>,
    /// The next part of the arguments' JSON text.
    pub(crate) arguments: String,
}

/// How a tool call begins.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ToolCallBegin {
    /// Names the call in the client's next request.
    pub(crate) id: String,
    /// The tool's name.
    pub(crate) name: String,
}

impl Delta {
    /// Whether there is anything to tell apart from the tokens.
    pub(crate) fn has_text(&self) -> bool {
        !(self.reasoning.is_empty() && self.content.is_empty() && self.tool_calls.is_empty())
    }

    pub(crate) fn append(&mut self, other: Self) {
        self.reasoning.push_str(&other.reasoning);
        self.content.push_str(&other.content);
        for part in other.tool_calls {
            self.append_call(part);
        }
        self.tokens.extend(other.tokens);
    }

    fn append_call(&mut self, part: ToolCallDelta) {
        match self.tool_calls.last_mut() {
            Some(last) if last.index == part.index => last.arguments.push_str(&part.arguments),
            _ => self.tool_calls.push(part),
        }
    }
}

/// Why an answer ended, in `OpenAI`'s words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// An end-of-turn token, a stop token or a stop string.
    Stop,
    /// `max_tokens` or the context's end.
    Length,
    /// The model waits for the results of its calls.
    ToolCalls,
}

impl Finish {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::Length => "length",
            Self::ToolCalls => "tool_calls",
        }
    }
}

/// How tool calls are looked for in an answer.
#[derive(Debug, Clone)]
pub(crate) struct CallRules {
    offered: Option<Arc<[OfferedTool]>>,
    /// Whether the first call ends the answer.
    end_with_call: bool,
    /// Why an answer with calls ended.
    finish: Finish,
}

impl CallRules {
    pub(crate) fn new(tools: &ToolSettings) -> Self {
        Self {
            offered: tools.offered(),
            end_with_call: tools.end_with_call(),
            // So it is with OpenAI: the client that said which call to make is not told of it.
            finish: if tools.is_named() { Finish::Stop } else { Finish::ToolCalls },
        }
    }
}

/// One answer in the making. Text goes token -> characters -> thinking, content or calls; content -> stop strings.
pub(crate) struct Choice {
    detokenizer: Detokenizer,
    parser: AnswerParser,
    stop: StopMatcher,
    stop_strings: Vec<String>,
    calls: CallRules,
    /// How many calls have begun.
    call_count: usize,
    ending_tokens: Arc<[u32]>,
    show_ending: bool,
    shown: ShownThinking,
    generated_chars: usize,
    pub(crate) generated_tokens: usize,
    pub(crate) reasoning_tokens: usize,
    pub(crate) finish: Option<Finish>,
    /// The stop string that ended the answer.
    pub(crate) matched_stop: Option<String>,
}

impl Choice {
    /// `ending_tokens` end the answer and are no text of it, unless the rules want to see what stopped it.
    pub(crate) fn new(
        tokenizer: &Arc<Tokenizer>,
        rules: &OutputRules,
        ending_tokens: Arc<[u32]>,
        calls: CallRules,
        prompt: &Prompt,
    ) -> Self {
        Self {
            detokenizer: Detokenizer::new(Arc::clone(tokenizer), rules.skip_special),
            parser: AnswerParser::new(prompt.opens_reasoning, calls.offered.clone()),
            stop: StopMatcher::new(rules.stop.clone(), rules.include_stop),
            stop_strings: rules.stop.clone(),
            calls,
            call_count: 0,
            ending_tokens,
            show_ending: rules.include_stop,
            shown: ShownThinking::new(rules.thinking),
            generated_chars: 0,
            generated_tokens: 0,
            reasoning_tokens: 0,
            finish: None,
            matched_stop: None,
        }
    }

    /// Takes tokens in order. A stop string ends the answer: what follows is dropped and not counted.
    pub(crate) fn push(&mut self, tokens: Vec<TokenOut>) -> Delta {
        let mut delta = Delta::default();
        for token in tokens {
            if self.finish.is_some() {
                break;
            }
            self.push_token(token, &mut delta);
        }
        self.shown.place(&mut delta);
        delta
    }

    /// The engine has ended the answer: text that was held back.
    pub(crate) fn end(&mut self, finish: Finish) -> Delta {
        let mut delta = Delta::default();
        if self.finish.is_some() {
            return delta;
        }
        self.finish = Some(finish);
        let rest = self.detokenizer.finish();
        let pieces = self.parser.push(&rest);
        self.take_pieces(pieces, &mut delta);
        let pieces = self.parser.finish();
        self.take_pieces(pieces, &mut delta);
        delta.content.push_str(&self.stop.finish());
        self.finish = self.finish.map(|finish| self.with_calls(finish));
        self.shown.place(&mut delta);
        delta
    }

    fn push_token(&mut self, token: TokenOut, delta: &mut Delta) {
        let TokenOut { id, logprobs } = token;
        self.generated_tokens += 1;
        let thinking = self.parser.is_thinking();
        self.reasoning_tokens += usize::from(thinking);
        delta.tokens.push(AnswerToken { id, offset_chars: self.generated_chars, thinking, logprobs });
        if self.ending_tokens.contains(&id) && !self.show_ending {
            return;
        }
        let text = self.detokenizer.push(id);
        self.generated_chars += text.chars().count();
        let pieces = self.parser.push(&text);
        self.take_pieces(pieces, delta);
    }

    fn take_pieces(&mut self, pieces: Vec<Piece>, delta: &mut Delta) {
        for piece in pieces {
            match piece {
                Piece::Reasoning(text) => delta.reasoning.push_str(&text),
                Piece::Content(text) => {
                    let outcome = self.stop.push(&text);
                    delta.content.push_str(&outcome.text);
                    if let Some(matched) = outcome.matched {
                        self.matched_stop = self.stop_strings.get(matched).cloned();
                        self.finish = Some(self.with_calls(Finish::Stop));
                        return;
                    }
                }
                Piece::Call(CallPiece::Begin { name }) => {
                    // A stop string does not reach across a call.
                    delta.content.push_str(&self.stop.finish());
                    let begin = Some(ToolCallBegin { id: random_id("call_"), name });
                    let index = self.call_count;
                    self.call_count += 1;
                    delta.append_call(ToolCallDelta { index, begin, arguments: String::new() });
                }
                Piece::Call(CallPiece::Arguments(arguments)) => {
                    let index = self.call_count.saturating_sub(1);
                    delta.append_call(ToolCallDelta { index, begin: None, arguments });
                }
                Piece::Call(CallPiece::End) => {
                    if self.calls.end_with_call && self.finish.is_none() {
                        self.finish = Some(self.calls.finish);
                        return;
                    }
                }
            }
        }
    }

    /// Why the answer ended, knowing its calls.
    fn with_calls(&self, finish: Finish) -> Finish {
        if finish == Finish::Stop && self.call_count > 0 { self.calls.finish } else { finish }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::OnceLock;

    use proptest::prelude::*;

    use super::*;
    use crate::thinking::ThinkingOutput;
    use crate::tools::Tool;

    fn tokenizer() -> Arc<Tokenizer> {
        static LOADED: OnceLock<Arc<Tokenizer>> = OnceLock::new();
        let load = || {
            let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny/tokenizer.json");
            Arc::new(Tokenizer::from_json(&std::fs::read(path).unwrap(), None).unwrap())
        };
        Arc::clone(LOADED.get_or_init(load))
    }

    /// One token for each byte: text at its most cut.
    fn byte_tokens(text: &str) -> Vec<u32> {
        static IDS: OnceLock<Vec<u32>> = OnceLock::new();
        let ids = IDS.get_or_init(|| {
            let tokenizer = tokenizer();
            let id_of = |byte: u8| (0..8192).find(|&id| tokenizer.token_bytes(id) == Some(&[byte])).unwrap();
            (0..=u8::MAX).map(id_of).collect()
        });
        text.bytes().map(|byte| ids[usize::from(byte)]).collect()
    }

    fn tools() -> ToolSettings {
        let parameters = serde_json::json!({"type": "object", "properties": {"a": {"type": "string"}}});
        let tool = Tool::new("tools[0]", serde_json::json!({"name": "f", "parameters": parameters})).unwrap();
        ToolSettings::new(vec![tool], None, true, "tool_choice").unwrap()
    }

    /// An answer that may call a tool and has said nothing yet.
    fn choice(stop: &[String], opens_reasoning: bool) -> Choice {
        let rules = OutputRules {
            stop: stop.to_vec(),
            include_stop: false,
            skip_special: true,
            return_token_ids: false,
            thinking: ThinkingOutput::Apart,
        };
        let prompt = Prompt { ids: Arc::from([]), opens_reasoning, max_tokens: 0, effort: None };
        Choice::new(&tokenizer(), &rules, Arc::from([]), CallRules::new(&tools()), &prompt)
    }

    fn answer(ids: &[u32], step_tokens: &[usize], stop: &[String], opens_reasoning: bool) -> (Delta, Choice) {
        let mut choice = choice(stop, opens_reasoning);
        let mut whole = Delta::default();
        let mut rest = ids;
        for &step in step_tokens.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let (now, later) = rest.split_at(step.min(rest.len()));
            rest = later;
            let tokens = now.iter().map(|&id| TokenOut { id, logprobs: None }).collect();
            whole.append(choice.push(tokens));
        }
        whole.append(choice.end(Finish::Length));
        for begin in whole.tool_calls.iter_mut().filter_map(|call| call.begin.as_mut()) {
            assert!(begin.id.starts_with("call_"));
            begin.id.clear();
        }
        (whole, choice)
    }

    /// The content before, between and after the calls.
    fn stretches(ids: &[u32], stop: &[String], opens_reasoning: bool) -> Vec<String> {
        let (mut choice, mut stretches) = (choice(stop, opens_reasoning), vec![String::new()]);
        let mut take = |delta: Delta| {
            // A call tells what was held back before it.
            stretches.last_mut().unwrap().push_str(&delta.content);
            if delta.tool_calls.iter().any(|call| call.begin.is_some()) {
                stretches.push(String::new());
            }
        };
        for &id in ids {
            take(choice.push(vec![TokenOut { id, logprobs: None }]));
        }
        take(choice.end(Finish::Length));
        stretches
    }

    #[test]
    fn a_stop_string_does_not_reach_across_a_call() {
        let ids = byte_tokens("a<tool_call>\n<function=f>\n</function>\n</tool_call>b, then ab");
        let stop = ["ab".to_owned()];
        let (delta, choice) = answer(&ids, &[3], &stop, false);
        assert_eq!((delta.content.as_str(), delta.tool_calls.len()), ("ab, then ", 1));
        assert_eq!(choice.matched_stop.as_deref(), Some("ab"));
        assert_eq!(stretches(&ids, &stop, false), ["a", "b, then "]);
    }

    proptest! {
        #[test]
        fn steps_do_not_change_the_answer(
            text in "(a|b|é|🙂|\n|<|</think>|<think>|stop|<tool_call>|<function=f>|<parameter=a>|</parameter>|</tool_call>){0,16}",
            steps in prop::collection::vec(1..6_usize, 1..8),
            opens_reasoning: bool,
        ) {
            let ids = byte_tokens(&text);
            let stop = ["ab".to_owned(), "stop".to_owned()];
            let (at_once, once) = answer(&ids, &[ids.len().max(1)], &stop, opens_reasoning);
            let (in_steps, steps) = answer(&ids, &steps, &stop, opens_reasoning);
            prop_assert_eq!(&in_steps, &at_once);
            prop_assert_eq!(steps.finish, once.finish);
            prop_assert_eq!(steps.generated_tokens, once.generated_tokens);
            prop_assert_eq!(steps.reasoning_tokens, once.reasoning_tokens);
            let has_stop = |text: &str| stop.iter().any(|stop| text.contains(stop.as_str()));
            prop_assert!(!stretches(&ids, &stop, opens_reasoning).iter().any(|text| has_stop(text)));
            prop_assert!(!at_once.tool_calls.is_empty() || !has_stop(&at_once.content));
            prop_assert_eq!(at_once.tokens.len(), once.generated_tokens);
            if !opens_reasoning && at_once.tool_calls.is_empty() && once.finish == Some(Finish::Length) {
                prop_assert_eq!(at_once.content, text);
            }
        }
    }

    #[test]
    fn thinking_ends_with_its_tag_wherever_it_is_cut() {
        let ids = byte_tokens("hm</think>ok");
        for step in 1..5 {
            let (delta, choice) = answer(&ids, &[step], &[], true);
            assert_eq!((delta.reasoning.as_str(), delta.content.as_str()), ("hm", "ok"));
            assert_eq!(choice.reasoning_tokens, "hm</think>".len());
        }
    }

    #[test]
    fn offsets_are_characters() {
        let ids = byte_tokens("é🙂a");
        let (delta, _) = answer(&ids, &[3], &[], false);
        let offsets: Vec<usize> = delta.tokens.iter().map(|token| token.offset_chars).collect();
        assert_eq!(offsets, [0, 0, 1, 1, 1, 1, 2]);
    }
}
