//! Server-sent events out of bytes that arrive in any pieces.

/// Collects bytes and gives the data of every event that is complete.
#[derive(Debug, Default)]
pub(crate) struct Events {
    /// Bytes of the line that has not ended.
    line: Vec<u8>,
    /// Data lines of the event that has not ended.
    data: Option<String>,
}

impl Events {
    /// Takes the next bytes; the events that they complete, in order. Comments and other fields are skipped.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut complete = Vec::new();
        for &byte in bytes {
            if byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                complete.extend(self.end_line(line.strip_suffix(b"\r").unwrap_or(&line)));
            } else {
                self.line.push(byte);
            }
        }
        complete
    }

    fn end_line(&mut self, line: &[u8]) -> Option<String> {
        if line.is_empty() {
            return self.data.take();
        }
        if let Some(value) = line.strip_prefix(b"data:") {
            let value = String::from_utf8_lossy(value.strip_prefix(b" ").unwrap_or(value));
            match &mut self.data {
                None => self.data = Some(value.into_owned()),
                Some(data) => {
                    data.push('\n');
                    data.push_str(&value);
                }
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: &[u8] =
        b": hello\n\ndata: {\"a\": 1}\n\ndata:two\r\ndata: lines\r\n\r\nevent: x\nid: 3\n\ndata: [DONE]\n\n";

    #[test]
    fn data_is_kept_and_the_rest_skipped() {
        assert_eq!(Events::default().push(STREAM), ["{\"a\": 1}", "two\nlines", "[DONE]"]);
    }

    #[test]
    fn an_event_that_did_not_end_is_not_given() {
        assert!(Events::default().push(b"data: begun\n").is_empty());
    }

    proptest! {
        #[test]
        fn the_pieces_do_not_matter(cuts in prop::collection::vec(0..STREAM.len(), 0..12)) {
            let mut cuts = cuts;
            cuts.extend([0, STREAM.len()]);
            cuts.sort_unstable();
            let mut events = Events::default();
            let found: Vec<String> =
                cuts.windows(2).flat_map(|cut| events.push(&STREAM[cut[0]..cut[1]])).collect();
            prop_assert_eq!(found, Events::default().push(STREAM));
        }
    }
}
