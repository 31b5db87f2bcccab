//! Which files make up a checkpoint, and where each tensor lies.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde_json::Value;

use crate::error::WeightsError;
use crate::header::{self, Dtype, Entry};
use crate::json::{brief, parse_object};

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
    /// Its length.
    pub(crate) bytes: usize,
    /// Where it begins in the file.
    start: usize,
    source: &'a Bytes,
}

impl<'a> Tensor<'a> {
    /// Reads from `offset` on as many bytes as there is room for.
    pub(crate) fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), WeightsError> {
        self.source.read_at(self.start + offset, into).map_err(|source| self.unreadable(source))
    }

    /// Reads the same columns of every row, one row after another.
    pub(crate) fn read_columns(
        &self,
        row_bytes: usize,
        columns: Range<usize>,
        into: &mut [u8],
    ) -> Result<(), WeightsError> {
        if columns.len() == row_bytes {
            return self.read_at(0, into);
        }
        let rows = into.chunks_exact_mut(columns.len().max(1)).enumerate();
        rows.into_iter().try_for_each(|(row, into)| self.read_at(row * row_bytes + columns.start, into))
    }

    /// All bytes: for tensors that are small.
    pub(crate) fn read(&self) -> Result<Cow<'a, [u8]>, WeightsError> {
        let range = self.start..self.start + self.bytes;
        self.source.read(range).map_err(|source| self.unreadable(source))
    }

    fn unreadable(&self, source: io::Error) -> WeightsError {
        WeightsError::Read { file: format!("tensor `{}` in {}", self.name, self.file), source }
    }

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

/// The bytes of one file. Read, not mapped: what was read once and packed must not stay in the process's memory, and a
/// file that becomes shorter is an error, not a signal.
#[derive(Debug)]
enum Bytes {
    /// Compiled into the program.
    Static(&'static [u8]),
    Disk(File),
}

impl Bytes {
    fn open(path: &Path) -> io::Result<Self> {
        // Asked before opening: opening a pipe would wait for a writer.
        if !path.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file"));
        }
        Ok(Self::Disk(File::open(path)?))
    }

    fn len(&self) -> io::Result<u64> {
        match self {
            Self::Static(bytes) => Ok(bytes.len() as u64),
            Self::Disk(file) => Ok(file.metadata()?.len()),
        }
    }

    fn read_at(&self, start: usize, into: &mut [u8]) -> io::Result<()> {
        match self {
            Self::Static(bytes) => {
                let from = bytes.get(start..).and_then(|rest| rest.get(..into.len()));
                into.copy_from_slice(from.ok_or(io::ErrorKind::UnexpectedEof)?);
                Ok(())
            }
            Self::Disk(file) => file.read_exact_at(into, start as u64),
        }
    }

    fn read(&self, range: Range<usize>) -> io::Result<Cow<'_, [u8]>> {
        match self {
            Self::Static(bytes) => Ok(Cow::Borrowed(bytes.get(range).ok_or(io::ErrorKind::UnexpectedEof)?)),
            Self::Disk(_) => {
                let mut bytes = vec![0; range.len()];
                self.read_at(range.start, &mut bytes)?;
                Ok(Cow::Owned(bytes))
            }
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
    /// Opens the weights of a directory: the shards of the index, then every other safetensors file there
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
            let bytes = Bytes::open(&path).map_err(|source| match (&index, source.kind()) {
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
            bytes: entry.range.len(),
            start: entry.range.start,
            source: &shard.bytes,
        })
    }

    /// Canonical full names in order.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Bytes of all tensors that are read (vision is not).
    pub(crate) fn total_bytes(&self) -> u64 {
        self.names().filter_map(|name| self.tensor(name)).map(|tensor| tensor.bytes as u64).sum()
    }

    /// The files that a missing tensor was searched in, for messages.
    pub(crate) fn searched(&self) -> String {
        match self.shards.as_slice() {
            [only] => only.name.clone(),
            shards => format!("all {} safetensors files of {}", shards.len(), self.place.name()),
        }
    }

    /// The directory of files on disk.
    pub(crate) fn directory(&self) -> Option<&Path> {
        match &self.place {
            Place::Directory(path) => Some(path),
            Place::Memory(_) => None,
        }
    }

    /// What tells these files from others, and from themselves after a change: names, lengths and times of the
    /// weights, and the configuration. `None` where that cannot be told.
    pub(crate) fn identity(&self) -> Option<Vec<u8>> {
        let mut identity = self.read("config.json").ok()??.into_owned();
        for Shard { name, bytes, .. } in &self.shards {
            let Bytes::Disk(file) = bytes else { return None };
            let metadata = file.metadata().ok()?;
            let changed = metadata.modified().ok()?.duration_since(UNIX_EPOCH).ok()?;
            let line = format!("\n{name:?} {} {}", metadata.len(), changed.as_nanos());
            identity.extend_from_slice(line.as_bytes());
        }
        Some(identity)
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
        let header = || -> io::Result<(u64, Cow<'_, [u8]>)> {
            let file_bytes = bytes.len()?;
            let start = bytes.read(0..file_bytes.min(8) as usize)?;
            Ok((file_bytes, bytes.read(0..header::prefix_bytes(&start, file_bytes))?))
        };
        let entries = match header() {
            Ok((file_bytes, prefix)) => header::parse(&name, &prefix, file_bytes)?,
            Err(source) => return Err(WeightsError::Read { file: name, source }),
        };
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
