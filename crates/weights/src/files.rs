//! Which files make up a checkpoint, and where each tensor lies.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::error::WeightsError;
use crate::header::{self, Dtype, Entry};
use crate::json::{brief, parse_object};
use crate::memory::Bytes;

const INDEX: &str = "model.safetensors.index.json";

/// The name without the prefix of its nesting; `None` for vision tensors, which are not read.
pub(crate) fn canonical(stored: &str) -> Option<&str> {
    let prefixes = ["model.language_model.", "language_model.model.", "language_model.", "model."];
    let name = prefixes.iter().find_map(|prefix| stored.strip_prefix(prefix)).unwrap_or(stored);
    (!name.starts_with("visual.")).then_some(name)
}

/// One tensor as stored.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tensor<'a> {
    /// File that holds it.
    pub(crate) file: &'a str,
    /// Name as stored.
    pub(crate) name: &'a str,
    pub(crate) dtype: &'a Dtype,
    pub(crate) shape: &'a [usize],
    pub(crate) bytes: &'a [u8],
}

impl Tensor<'_> {
    /// The error for this tensor.
    pub(crate) fn fault(
        &self,
        what: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> WeightsError {
        WeightsError::Tensor {
            tensor: self.name.to_owned(),
            file: self.file.to_owned(),
            what,
            found: found.into(),
            expected: expected.into(),
        }
    }
}

/// One safetensors file.
#[derive(Debug)]
struct Shard {
    name: String,
    bytes: Bytes,
    entries: Vec<Entry>,
}

/// Where the files lie that are not weights.
#[derive(Debug)]
enum Place {
    Directory(PathBuf),
    Memory(Vec<(&'static str, &'static [u8])>),
}

/// All files of one checkpoint.
#[derive(Debug)]
pub(crate) struct Files {
    place: Place,
    shards: Vec<Shard>,
    /// Canonical name to shard and entry.
    tensors: BTreeMap<String, (usize, usize)>,
}

impl Files {
    /// Maps the weights of a directory: the shards of the index, then every other safetensors file there
    /// (some exporters put tensors that they left alone into an extra file).
    pub(crate) fn open(directory: &Path) -> Result<Self, WeightsError> {
        let place = Place::Directory(directory.to_owned());
        let present = list(directory)?;
        let index = Index::read(&place)?;
        let mut names = index.as_ref().map(Index::shards).unwrap_or_default();
        names.extend(present.iter().filter(|name| is_weights(name)).cloned());
        let mut seen = HashSet::new();
        let mut shards = Vec::new();
        for name in names.into_iter().filter(|name| seen.insert(name.clone())) {
            let path = directory.join(&name);
            let bytes = Bytes::map(&path).map_err(|source| match (&index, source.kind()) {
                (Some(index), io::ErrorKind::NotFound) => index.missing_shard(&name),
                _ => WeightsError::Read { file: path.display().to_string(), source },
            })?;
            shards.push(Shard::parse(name, bytes)?);
        }
        Self::assemble(place, shards, index, &present)
    }

    /// The same from files in memory.
    pub(crate) fn embedded(files: Vec<(&'static str, &'static [u8])>) -> Result<Self, WeightsError> {
        let present: Vec<String> = files.iter().map(|(name, _)| (*name).to_owned()).collect();
        let shards = files
            .iter()
            .filter(|(name, _)| is_weights(name))
            .map(|(name, bytes)| Shard::parse((*name).to_owned(), Bytes::Static(bytes)))
            .collect::<Result<Vec<_>, _>>()?;
        let place = Place::Memory(files);
        let index = Index::read(&place)?;
        Self::assemble(place, shards, index, &present)
    }

    fn assemble(
        place: Place,
        shards: Vec<Shard>,
        index: Option<Index>,
        present: &[String],
    ) -> Result<Self, WeightsError> {
        if shards.is_empty() {
            return Err(no_weights(&place, present));
        }
        if let Some(index) = index {
            index.check(&shards)?;
        }
        let mut tensors = BTreeMap::new();
        for (shard_at, shard) in shards.iter().enumerate() {
            for (entry_at, entry) in shard.entries.iter().enumerate() {
                let Some(name) = canonical(&entry.name) else { continue };
                if let Some((first, _)) = tensors.insert(name.to_owned(), (shard_at, entry_at)) {
                    return Err(WeightsError::Duplicate {
                        tensor: name.to_owned(),
                        first: shards[first].name.clone(),
                        second: shard.name.clone(),
                    });
                }
            }
        }
        Ok(Self { place, shards, tensors })
    }

    /// The tensor of that canonical full name.
    pub(crate) fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        let &(shard, entry) = self.tensors.get(name)?;
        let shard = &self.shards[shard];
        let entry = &shard.entries[entry];
        Some(Tensor {
            file: &shard.name,
            name: &entry.name,
            dtype: &entry.dtype,
            shape: &entry.shape,
            // In range: the header was checked against the file.
            bytes: shard.bytes.as_slice().get(entry.range.clone()).unwrap_or_default(),
        })
    }

    /// Canonical full names in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors that are read (vision is not).
    pub(crate) fn total_bytes(&self) -> u64 {
        self.names().filter_map(|name| self.tensor(name)).map(|tensor| tensor.bytes.len() as u64).sum()
    }

    /// The files that a missing tensor was searched in, for messages.
    pub(crate) fn searched(&self) -> String {
        match self.shards.as_slice() {
            [only] => only.name.clone(),
            shards => format!("all {} safetensors files of {}", shards.len(), self.place.name()),
        }
    }

    /// The place, for messages.
    pub(crate) fn place(&self) -> String {
        self.place.name()
    }

    /// A short name of the place, for the geometry of a model without a known one.
    pub(crate) fn short_name(&self) -> String {
        match &self.place {
            Place::Directory(path) => {
                path.file_name().map_or("model".to_owned(), |name| name.to_string_lossy().into_owned())
            }
            Place::Memory(_) => "embedded".to_owned(),
        }
    }

    /// A file beside the weights, `None` where there is none of that name.
    pub(crate) fn read(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, WeightsError> {
        self.place.read(name)
    }
}

impl Shard {
    fn parse(name: String, bytes: Bytes) -> Result<Self, WeightsError> {
        let entries = header::parse(&name, bytes.as_slice())?;
        Ok(Self { name, bytes, entries })
    }
}

impl Place {
    fn name(&self) -> String {
        match self {
            Self::Directory(path) => path.display().to_string(),
            Self::Memory(_) => "the embedded model".to_owned(),
        }
    }

    fn read(&self, name: &str) -> Result<Option<Cow<'_, [u8]>>, WeightsError> {
        if !is_plain(name) {
            return Ok(None);
        }
        match self {
            Self::Memory(files) => {
                Ok(files.iter().find(|(file, _)| *file == name).map(|(_, bytes)| Cow::Borrowed(*bytes)))
            }
            Self::Directory(directory) => {
                let path = directory.join(name);
                match fs::read(&path) {
                    Ok(bytes) => Ok(Some(Cow::Owned(bytes))),
                    Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(WeightsError::Read { file: path.display().to_string(), source }),
                }
            }
        }
    }
}

/// `model.safetensors.index.json`: tensor to shard.
struct Index {
    weight_map: Vec<(String, String)>,
}

impl Index {
    /// The index of a place, if it has one.
    fn read(place: &Place) -> Result<Option<Self>, WeightsError> {
        place.read(INDEX)?.map(|bytes| Self::parse(&bytes)).transpose()
    }

    fn parse(bytes: &[u8]) -> Result<Self, WeightsError> {
        let fault = |what: &str, found: String, expected: &str| WeightsError::Index {
            file: INDEX.to_owned(),
            what: what.to_owned(),
            found,
            expected: expected.to_owned(),
        };
        let top = parse_object(INDEX, bytes)?;
        let Some(map) = top.get("weight_map").and_then(Value::as_object) else {
            let found = top.get("weight_map").map_or_else(|| "nothing".to_owned(), brief);
            return Err(fault("weight_map", found, "an object of tensor names and shard names"));
        };
        let mut weight_map = Vec::with_capacity(map.len());
        for (tensor, shard) in map {
            // A shard outside the directory is not followed.
            let Some(shard) = shard.as_str().filter(|name| is_plain(name)) else {
                let what = format!("shard of tensor `{tensor}`");
                return Err(fault(&what, brief(shard), "the name of a file in the same directory"));
            };
            weight_map.push((tensor.clone(), shard.to_owned()));
        }
        Ok(Self { weight_map })
    }

    /// Shard names in order, each once.
    fn shards(&self) -> Vec<String> {
        let mut names: Vec<_> = self.weight_map.iter().map(|(_, shard)| shard.clone()).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    fn missing_shard(&self, shard: &str) -> WeightsError {
        let mut tensors = self.weight_map.iter().filter(|(_, of)| of == shard).map(|(tensor, _)| tensor);
        let first = tensors.next().map_or("", String::as_str);
        WeightsError::Index {
            file: INDEX.to_owned(),
            what: format!("shard {shard}"),
            found: "no such file".to_owned(),
            expected: format!("a file with tensor `{first}` and {} more", tensors.count()),
        }
    }

    /// Every tensor lies in the shard that the index says.
    fn check(&self, shards: &[Shard]) -> Result<(), WeightsError> {
        for name in self.shards() {
            let Some(shard) = shards.iter().find(|shard| shard.name == name) else {
                return Err(self.missing_shard(&name));
            };
            let stored: HashSet<&str> = shard.entries.iter().map(|entry| entry.name.as_str()).collect();
            let mut promised = self.weight_map.iter().filter(|(_, of)| *of == name);
            if let Some((tensor, _)) = promised.find(|(tensor, _)| !stored.contains(tensor.as_str())) {
                let elsewhere = shards.iter().find(|s| s.entries.iter().any(|entry| entry.name == *tensor));
                return Err(WeightsError::Index {
                    file: INDEX.to_owned(),
                    what: format!("tensor `{tensor}`"),
                    found: elsewhere.map_or("it in no shard".to_owned(), |s| format!("it in {}", s.name)),
                    expected: format!("it in {name}"),
                });
            }
        }
        Ok(())
    }
}

/// A file name without any path.
fn is_plain(name: &str) -> bool {
    Path::new(name).file_name().is_some_and(|file| file == name)
}

fn is_weights(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|extension| extension == "safetensors")
}

/// Names in a directory, sorted.
fn list(directory: &Path) -> Result<Vec<String>, WeightsError> {
    let fault = |source| WeightsError::Read { file: directory.display().to_string(), source };
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(fault)? {
        names.push(entry.map_err(fault)?.file_name().to_string_lossy().into_owned());
    }
    names.sort_unstable();
    Ok(names)
}

fn no_weights(place: &Place, present: &[String]) -> WeightsError {
    let shown: Vec<&str> = present.iter().map(String::as_str).take(12).collect();
    let found = if shown.is_empty() { "no files".to_owned() } else { shown.join(", ") };
    WeightsError::NoCheckpoint { place: place.name(), found, expected: "*.safetensors files" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_nesting_gives_the_same_name() {
        for stored in
            ["model.language_model.layers.0.x", "language_model.model.layers.0.x", "model.layers.0.x"]
        {
            assert_eq!(canonical(stored), Some("layers.0.x"));
        }
        for stored in ["lm_head.weight", "language_model.lm_head.weight"] {
            assert_eq!(canonical(stored), Some("lm_head.weight"));
        }
        assert_eq!(canonical("mtp.fc.weight"), Some("mtp.fc.weight"));
        assert_eq!(canonical("model.visual.pos_embed.weight"), None);
        assert_eq!(canonical("visual.pos_embed.weight"), None);
    }

    #[test]
    fn only_plain_names_are_read() {
        for name in ["", ".", "..", "a/b", "../x", "/etc/passwd"] {
            assert!(!is_plain(name), "{name}");
        }
        assert!(is_plain("tokenizer.json"));
    }
}
