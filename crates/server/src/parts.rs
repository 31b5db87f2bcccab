//! The parts of an answer in their order: thinking, text, calls of tools. Some APIs tell each of them apart, with a
//! beginning and an end.

use serde_json::{Value, json};

use crate::choice::{Delta, ToolCallBegin};

/// What a part is.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PartKind {
    Reasoning,
    Text,
    Call(ToolCallBegin),
}

/// A part with its text so far: for a call the JSON text of its arguments.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Part {
    pub(crate) kind: PartKind,
    pub(crate) text: String,
}

impl Part {
    /// The arguments of a call. What was cut short in the middle is nothing that a tool could take: there are none then.
    pub(crate) fn arguments(&self) -> Value {
        let whole = serde_json::from_str(&self.text).ok().filter(Value::is_object);
        whole.unwrap_or_else(|| json!({}))
    }
}

/// What happened to a part.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum PartNews {
    Begun,
    /// Its text goes on.
    More(String),
    /// Nothing more follows, its text is complete.
    Ended,
}

/// Puts the parts of one answer together. A part ends when the next one begins.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    list: Vec<Part>,
    open: bool,
    /// White space that is text only if more text follows: models write it in front of calls.
    blank: String,
}

impl Parts {
    pub(crate) fn all(&self) -> &[Part] {
        &self.list
    }

    pub(crate) fn has_calls(&self) -> bool {
        self.list.iter().any(|part| matches!(part.kind, PartKind::Call(_)))
    }

    /// Takes what was added to the answer; tells what became of which part, in order.
    pub(crate) fn take(&mut self, delta: Delta) -> Vec<(usize, PartNews)> {
        let mut news = Vec::new();
        self.grow(&PartKind::Reasoning, delta.reasoning, &mut news);
        self.take_text(delta.content, &mut news);
        for call in delta.tool_calls {
            if let Some(begin) = call.begin {
                self.blank.clear();
                self.begin(PartKind::Call(begin), &mut news);
            }
            self.extend(call.arguments, &mut news);
        }
        news
    }

    /// The answer is over.
    pub(crate) fn finish(&mut self) -> Vec<(usize, PartNews)> {
        let mut news = Vec::new();
        self.end(&mut news);
        news
    }

    fn take_text(&mut self, content: String, news: &mut Vec<(usize, PartNews)>) {
        let in_text = self.open && self.list.last().is_some_and(|part| part.kind == PartKind::Text);
        if in_text {
            return self.extend(content, news);
        }
        self.blank.push_str(&content);
        if !self.blank.trim().is_empty() {
            let text = std::mem::take(&mut self.blank);
            self.grow(&PartKind::Text, text, news);
        }
    }

    /// Adds to the last part if it is of this kind, else begins one.
    fn grow(&mut self, kind: &PartKind, text: String, news: &mut Vec<(usize, PartNews)>) {
        if text.is_empty() {
            return;
        }
        let goes_on = self.open && self.list.last().is_some_and(|part| part.kind == *kind);
        if !goes_on {
            self.begin(kind.clone(), news);
        }
        self.extend(text, news);
    }

    fn begin(&mut self, kind: PartKind, news: &mut Vec<(usize, PartNews)>) {
        self.end(news);
        self.open = true;
        news.push((self.list.len(), PartNews::Begun));
        self.list.push(Part { kind, text: String::new() });
    }

    fn extend(&mut self, text: String, news: &mut Vec<(usize, PartNews)>) {
        if let Some(index) = self.list.len().checked_sub(1).filter(|_| !text.is_empty()) {
            self.list[index].text.push_str(&text);
            news.push((index, PartNews::More(text)));
        }
    }

    fn end(&mut self, news: &mut Vec<(usize, PartNews)>) {
        if std::mem::take(&mut self.open) {
            news.push((self.list.len() - 1, PartNews::Ended));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::choice::ToolCallDelta;

    fn reasoning(text: &str) -> Delta {
        Delta { reasoning: text.into(), ..Delta::default() }
    }

    fn content(text: &str) -> Delta {
        Delta { content: text.into(), ..Delta::default() }
    }

    fn call(index: usize, name: Option<&str>, arguments: &str) -> Delta {
        let begin = name.map(|name| ToolCallBegin { id: format!("call-{index}"), name: name.into() });
        let part = ToolCallDelta { index, begin, arguments: arguments.into() };
        Delta { tool_calls: vec![part], ..Delta::default() }
    }

    fn summary(parts: &Parts) -> Vec<(&str, &str)> {
        parts
            .all()
            .iter()
            .map(|part| match &part.kind {
                PartKind::Reasoning => ("reasoning", part.text.as_str()),
                PartKind::Text => ("text", part.text.as_str()),
                PartKind::Call(begin) => (begin.name.as_str(), part.text.as_str()),
            })
            .collect()
    }

    #[test]
    fn parts_follow_each_other_and_each_ends() {
        let mut parts = Parts::default();
        let mut news = Vec::new();
        let deltas = [
            reasoning("so"),
            reasoning("?"),
            content("\n"),
            content("Hi "),
            content(" "),
            content("you\n\n"),
            call(0, Some("f"), ""),
            call(0, None, "{\"a\":"),
            call(0, None, "1}"),
            content("\n"),
            call(1, Some("g"), "{}"),
        ];
        for delta in deltas {
            news.extend(parts.take(delta));
        }
        news.extend(parts.finish());
        let expected = [("reasoning", "so?"), ("text", "\nHi  you\n\n"), ("f", "{\"a\":1}"), ("g", "{}")];
        assert_eq!(summary(&parts), expected);
        for (index, part) in parts.all().iter().enumerate() {
            let of_part: Vec<&PartNews> =
                news.iter().filter(|(of, _)| *of == index).map(|(_, news)| news).collect();
            assert_eq!(of_part.first(), Some(&&PartNews::Begun));
            assert_eq!(of_part.last(), Some(&&PartNews::Ended));
            let text: String = of_part
                .iter()
                .filter_map(|news| match news {
                    PartNews::More(text) => Some(text.as_str()),
                    _ => None,
                })
                .collect();
            assert_eq!(text, part.text);
        }
        assert!(news.is_sorted_by_key(|(index, _)| *index));
    }

    #[test]
    fn white_space_alone_is_no_part() {
        let mut parts = Parts::default();
        assert_eq!(parts.take(content("\n\n")), []);
        parts.take(call(0, Some("f"), "{}"));
        assert_eq!(summary(&parts), [("f", "{}")]);
        let mut empty = Parts::default();
        assert_eq!(empty.finish(), []);
    }
}
