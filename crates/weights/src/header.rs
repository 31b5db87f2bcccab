//! The safetensors container: 8 bytes of header length, a JSON header, then the tensors' bytes.
//!
//! Read here rather than by the `safetensors` crate because every fault must name the tensor, what was found
//! and what was expected, and because a name that appears twice must be an error. As strict as the format:
//! the tensors tile the data without gaps or overlaps.

use std::collections::HashSet;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use serde_json::Value;

use crate::error::WeightsError;

/// Longest header accepted, as in the reference implementation.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Element type of a stored tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Dtype {
    F32,
    F16,
    Bf16,
    I64,
    I32,
    I8,
    /// A type of the format that only vision or unsupported checkpoints use, by its name.
    Other(String),
}

impl Dtype {
    /// The type and its bits per element; `None` for a name that the format does not have.
    fn parse(name: &str) -> Option<(Self, u64)> {
        Some(match name {
            "F32" => (Self::F32, 32),
            "F16" => (Self::F16, 16),
            "BF16" => (Self::Bf16, 16),
            "I64" => (Self::I64, 64),
            "I32" => (Self::I32, 32),
            "I8" => (Self::I8, 8),
            "F64" | "U64" | "C64" => (Self::Other(name.to_owned()), 64),
            "U32" => (Self::Other(name.to_owned()), 32),
            "U16" | "I16" => (Self::Other(name.to_owned()), 16),
            "BOOL" | "U8" | "F8_E4M3" | "F8_E5M2" | "F8_E8M0" | "F8_E4M3FNUZ" | "F8_E5M2FNUZ" => {
                (Self::Other(name.to_owned()), 8)
            }
            "F6_E2M3" | "F6_E3M2" => (Self::Other(name.to_owned()), 6),
            "F4" => (Self::Other(name.to_owned()), 4),
            _ => return None,
        })
    }

    /// The format's own name.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::I64 => "I64",
            Self::I32 => "I32",
            Self::I8 => "I8",
            Self::Other(name) => name,
        }
    }
}

/// One tensor of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Name as stored.
    pub(crate) name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub(crate) range: Range<usize>,
}

/// Bytes of the length at the start, and what it says about the header that follows: as many as are in the file or
/// may be accepted.
pub(crate) fn prefix_bytes(start: &[u8], file_bytes: u64) -> usize {
    let header_bytes = start.first_chunk().map_or(0, |length| u64::from_le_bytes(*length));
    (8 + header_bytes.min(MAX_HEADER_BYTES)).min(file_bytes) as usize
}

/// Reads and checks the header. `file` is for messages; `bytes` are the first [`prefix_bytes`] of the file or more,
/// `file_bytes` its length.
pub(crate) fn parse(file: &str, bytes: &[u8], file_bytes: u64) -> Result<Vec<Entry>, WeightsError> {
    let fault = |found: String, expected: &str| WeightsError::Header {
        file: file.to_owned(),
        found,
        expected: expected.to_owned(),
    };
    let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
        return Err(fault(format!("{file_bytes} bytes"), "at least the 8 bytes of the header length"));
    };
    let header_bytes = u64::from_le_bytes(*length);
    if header_bytes > MAX_HEADER_BYTES {
        return Err(fault(format!("a header length of {header_bytes}"), "at most 100000000 bytes"));
    }
    let Some(header) = rest.get(..header_bytes as usize) else {
        return Err(fault(
            format!("a header length of {header_bytes} in a file of {file_bytes} bytes"),
            "a header that ends inside the file",
        ));
    };
    let RawHeader(raw) = serde_json::from_slice(header).map_err(|error| {
        fault(format!("a header that does not parse ({error})"), "a JSON object of tensors")
    })?;
    let data_start = 8 + header.len();
    let mut names = HashSet::new();
    let mut entries = Vec::with_capacity(raw.len());
    for (name, value) in &raw {
        if !names.insert(name) {
            return Err(WeightsError::Duplicate {
                tensor: name.clone(),
                first: file.to_owned(),
                second: file.to_owned(),
            });
        }
        if name != "__metadata__" {
            entries.push(entry(file, name, value, data_start)?);
        }
    }
    entries.sort_by_key(|entry| (entry.range.start, entry.range.end));
    check_tiling(file, &entries, data_start, file_bytes as usize)?;
    Ok(entries)
}

/// One header entry, its byte range checked against dtype and shape but not yet against the file.
fn entry(file: &str, name: &str, value: &Value, data_start: usize) -> Result<Entry, WeightsError> {
    let fault = |what, found: String, expected: String| WeightsError::Tensor {
        tensor: name.to_owned(),
        file: file.to_owned(),
        what,
        found,
        expected,
    };
    let text = |key: &str| value.get(key).map_or_else(|| "nothing".to_owned(), ToString::to_string);
    let dtype_name = value.get("dtype").and_then(Value::as_str);
    let Some((dtype, bits)) = dtype_name.and_then(Dtype::parse) else {
        return Err(fault("dtype", text("dtype"), "a dtype of the safetensors format".to_owned()));
    };
    let Some(shape) = value.get("shape").and_then(sizes) else {
        return Err(fault("header shape", text("shape"), "a list of sizes".to_owned()));
    };
    let offsets = value.get("data_offsets").and_then(sizes);
    let Some(&[begin, end]) = offsets.as_deref() else {
        return Err(fault("data_offsets", text("data_offsets"), "two offsets".to_owned()));
    };
    // In u128, so that no product of a hostile shape wraps before it is compared.
    let elements = shape.iter().try_fold(1u128, |product, &size| product.checked_mul(size as u128));
    let size = elements.and_then(|n| n.checked_mul(u128::from(bits))).map(|bits| bits.div_ceil(8));
    let expected = size.map_or_else(
        || "a size that fits in memory".to_owned(),
        |size| format!("{size} bytes for {} {shape:?}", dtype.name()),
    );
    let stored = end.checked_sub(begin);
    if size.is_none() || stored.map(|bytes| bytes as u128) != size {
        return Err(fault("data_offsets", format!("[{begin}, {end}]"), expected));
    }
    match (begin.checked_add(data_start), end.checked_add(data_start)) {
        (Some(start), Some(stop)) => Ok(Entry { name: name.to_owned(), dtype, shape, range: start..stop }),
        _ => Err(fault("data_offsets", format!("[{begin}, {end}]"), "offsets inside the file".to_owned())),
    }
}

fn sizes(value: &Value) -> Option<Vec<usize>> {
    value.as_array()?.iter().map(|size| usize::try_from(size.as_u64()?).ok()).collect()
}

/// The sorted entries must cover `data_start..file_bytes` exactly.
fn check_tiling(
    file: &str,
    entries: &[Entry],
    data_start: usize,
    file_bytes: usize,
) -> Result<(), WeightsError> {
    let mut position = data_start;
    for entry in entries {
        let fault = |what, found: String, expected: String| WeightsError::Tensor {
            tensor: entry.name.clone(),
            file: file.to_owned(),
            what,
            found,
            expected,
        };
        let (start, end) = (entry.range.start, entry.range.end);
        if end > file_bytes {
            return Err(fault(
                "truncated file",
                format!("{file_bytes} bytes"),
                format!("at least {end} bytes, where this tensor ends"),
            ));
        }
        if start != position {
            let what = if start < position { "overlapping bytes" } else { "gap before the bytes" };
            return Err(fault(
                what,
                format!("offset {}", start - data_start),
                format!("offset {}, where the tensor before it ends", position - data_start),
            ));
        }
        position = end;
    }
    if position != file_bytes {
        return Err(WeightsError::Header {
            file: file.to_owned(),
            found: format!("{file_bytes} bytes"),
            expected: format!("{position} bytes, where the last tensor ends"),
        });
    }
    Ok(())
}

/// The header's entries in file order, repeated names kept.
struct RawHeader(Vec<(String, Value)>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;
            fn expecting(&self, formatter: &mut fmt::Formatter) -> fmt::Result {
                formatter.write_str("an object of tensors")
            }
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<RawHeader, M::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(RawHeader(entries))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn file(header: &str, data_bytes: usize) -> Vec<u8> {
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend_from_slice(header.as_bytes());
        bytes.resize(bytes.len() + data_bytes, 0);
        bytes
    }

    /// From the first bytes alone, as of a file.
    fn parse_whole(bytes: &[u8]) -> Result<Vec<Entry>, WeightsError> {
        let file_bytes = bytes.len() as u64;
        parse("f", &bytes[..prefix_bytes(bytes, file_bytes)], file_bytes)
    }

    #[test]
    fn entries_come_sorted_with_absolute_ranges() {
        let header = r#"{"__metadata__":{"format":"pt"},
            "b":{"dtype":"BF16","shape":[2,2],"data_offsets":[4,12]},
            "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
            "empty":{"dtype":"I64","shape":[0],"data_offsets":[4,4]}}"#;
        let entries = parse_whole(&file(header, 12)).unwrap();
        let start = 8 + header.len();
        let seen: Vec<_> = entries.iter().map(|e| (e.name.as_str(), e.range.clone())).collect();
        assert_eq!(
            seen,
            [("a", start..start + 4), ("empty", start + 4..start + 4), ("b", start + 4..start + 12)]
        );
        assert_eq!(entries[2].shape, [2, 2]);
    }

    #[test]
    fn hostile_shapes_do_not_wrap() {
        for shape in ["[18446744073709551615,18446744073709551615,2]", "[4294967296,4294967296]"] {
            let header = format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,0]}}}}"#);
            assert!(parse_whole(&file(&header, 0)).is_err());
        }
        let header =
            r#"{"a":{"dtype":"I8","shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]}}"#;
        assert!(parse_whole(&file(header, 1)).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse_whole(&bytes);
        }

        #[test]
        fn mutated_headers_never_panic(at in 0usize..150, byte in any::<u8>(), cut in 0usize..200) {
            let header = r#"{"a":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]},
                "b":{"dtype":"F16","shape":[3],"data_offsets":[8,14]}}"#;
            let mut bytes = file(header, 14);
            let at = at % bytes.len();
            bytes[at] = byte;
            bytes.truncate(bytes.len() - cut.min(bytes.len()));
            let _ = parse_whole(&bytes);
        }
    }
}
