//! Rounded weights on disk, so that the next start reads 4 or 8 bits where the checkpoint has 16, and rounds nothing.
//!
//! What a device makes of rounded codes takes it less time than their way from the disk, so what is kept is what
//! every device is given: one file serves them all and outlives a change of their layouts. Only matrices that are
//! rounded at load are in it; the others are read from the checkpoint as always.
//!
//! A file is the magic, the key, the digest of the table, the table of the blocks' digests (SHA-256, 32 bytes each),
//! then the blocks: codes, then scales. Where each block lies follows from the key, which is a digest of everything
//! that decides the contents. Nothing in the file is trusted: a file with another key or length is not used, and a
//! block with another digest is read from the checkpoint.
//!
//! A file is written under another name while the weights are loaded, and renamed when it is complete. It is not
//! flushed to disk first: if power fails, digests tell.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest, Sha256};

use crate::matrix::{Matrix, row_bytes, scale_row_bytes};
use crate::stream::Job;

/// The format, and the rounding: another number wherever the same checkpoint gives other bytes.
const MAGIC: &[u8; 8] = b"QWROUND1";
const DIGEST_BYTES: usize = 32;
/// Magic, key, digest of the table.
const HEADER_BYTES: usize = MAGIC.len() + 2 * DIGEST_BYTES;

type Sha = [u8; DIGEST_BYTES];

/// Where rounded weights are kept between starts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum WeightCache {
    /// Nowhere.
    #[default]
    Off,
    /// In the checkpoint's directory.
    Beside,
    /// In this directory, which is made when it is first needed.
    In(PathBuf),
}

impl WeightCache {
    /// The file for a checkpoint in `directory`, rounded as `label` says; `None` where nothing is kept.
    pub(crate) fn file(&self, directory: &Path, label: &str) -> Option<PathBuf> {
        match self {
            Self::Off => None,
            Self::Beside => Some(directory.join(format!("qwill-{label}.cache"))),
            Self::In(caches) => {
                // The whole path decides: directories of different models may have one name.
                let path = directory.canonicalize().unwrap_or_else(|_| directory.to_owned());
                let digest = Sha256::digest(path.as_os_str().as_encoded_bytes());
                let name = path.file_name().map_or("model".into(), |name| name.to_string_lossy());
                let number = digest.iter().take(4).fold(0u32, |number, byte| number << 8 | u32::from(*byte));
                Some(caches.join(format!("{name}-{number:08x}-{label}.cache")))
            }
        }
    }
}

/// Where each block lies, and the key of the file.
#[derive(Debug)]
pub(crate) struct CacheLayout {
    key: Sha,
    /// Per job; `None` for a block that is not kept.
    places: Vec<Option<Place>>,
    blocks: usize,
    file_bytes: u64,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    /// In the table.
    index: usize,
    offset: u64,
}

impl CacheLayout {
    /// The layout of a stream's blocks. `identity` is everything about the checkpoint that may decide the contents of
    /// the rounded ones; `None` when nothing is rounded.
    pub(crate) fn new(identity: &[u8], jobs: &[Job<'_>]) -> Option<Self> {
        let blocks = jobs.iter().filter(|job| job.rounded).count();
        if blocks == 0 {
            return None;
        }
        let mut key = Sha256::new();
        key.update(identity);
        key.update([u8::from(cfg!(target_endian = "big"))]);
        let mut end = (HEADER_BYTES + blocks * DIGEST_BYTES) as u64;
        let mut index = 0;
        let place = |job: &Job<'_>| {
            job.rounded.then(|| {
                let row = row_bytes(job.format, job.cols()) + scale_row_bytes(job.format, job.cols());
                let place = Place { index, offset: end };
                index += 1;
                end += (job.rows.len() * row) as u64;
                let described =
                    format!("{} {:?} {} {}\n", job.name(), job.rows, job.cols(), job.format.name());
                key.update(described);
                place
            })
        };
        let places = jobs.iter().map(place).collect();
        Some(Self { key: key.finalize().into(), places, blocks, file_bytes: end })
    }
}

/// A cache that is being read or written.
#[derive(Debug)]
pub(crate) struct Cache {
    path: PathBuf,
    layout: CacheLayout,
    state: State,
    /// A block was damaged, or could not be written.
    failed: AtomicBool,
}

#[derive(Debug)]
enum State {
    Read { file: File, table: Vec<Sha> },
    Write { draft: Draft, table: Mutex<Vec<Sha>> },
}

impl Cache {
    /// Opens a valid file to be read, or else begins one. `None`, with a warning, where neither is possible.
    pub(crate) fn open(path: PathBuf, layout: CacheLayout) -> Option<Self> {
        let failed = AtomicBool::new(false);
        match read_table(&path, &layout) {
            Ok((file, table)) => {
                tracing::info!("reading rounded weights from {}", path.display());
                return Some(Self { path, layout, state: State::Read { file, table }, failed });
            }
            Err(Refusal::Absent) => {}
            Err(Refusal::Reason(reason)) => {
                tracing::warn!("not used: {}: {reason}; it is written anew", path.display());
            }
        }
        match Draft::begin(&path, layout.file_bytes) {
            Ok(Some(draft)) => {
                let table = Mutex::new(vec![[0; DIGEST_BYTES]; layout.blocks]);
                Some(Self { path, layout, state: State::Write { draft, table }, failed })
            }
            Ok(None) => {
                tracing::info!("another process is writing {}", path.display());
                None
            }
            Err(error) => {
                tracing::warn!("rounded weights are not kept: {}: {error}", path.display());
                None
            }
        }
    }

    /// Reads the block of a job, which has the right shape already. `false` where it is not here or not sound.
    pub(crate) fn read(&self, job: usize, block: &mut Matrix) -> bool {
        let State::Read { file, table } = &self.state else { return false };
        let Some(place) = self.layout.places[job] else { return false };
        let mut read = || -> io::Result<bool> {
            file.read_exact_at(block.elements.bytes_mut(), place.offset)?;
            let scales_at = place.offset + block.elements.bytes().len() as u64;
            file.read_exact_at(block.scales.bytes_mut(), scales_at)?;
            Ok(digest(block) == table[place.index])
        };
        match read() {
            Ok(true) => true,
            Ok(false) => {
                self.fail("a block is damaged; the checkpoint is read instead, and the file removed");
                false
            }
            Err(error) => {
                self.fail(&format!("{error}; the checkpoint is read instead, and the file removed"));
                false
            }
        }
    }

    /// Keeps the block of a job while the file is written.
    pub(crate) fn write(&self, job: usize, block: &Matrix) {
        let State::Write { draft, table } = &self.state else { return };
        let Some(place) = self.layout.places[job] else { return };
        if self.failed.load(Ordering::Relaxed) {
            return;
        }
        let elements = block.elements.bytes();
        let write = || -> io::Result<()> {
            draft.file.write_all_at(elements, place.offset)?;
            draft.file.write_all_at(block.scales.bytes(), place.offset + elements.len() as u64)
        };
        match (write(), table.lock()) {
            (Ok(()), Ok(mut table)) => table[place.index] = digest(block),
            (Err(error), _) => self.fail(&format!("{error}; rounded weights are not kept")),
            (_, Err(_)) => self.fail("a thread panicked; rounded weights are not kept"),
        }
    }

    fn fail(&self, reason: &str) {
        if !self.failed.swap(true, Ordering::Relaxed) {
            tracing::warn!("{}: {reason}", self.path.display());
        }
    }

    /// Puts a file that was written in its place, removes one that is damaged. Called when all blocks were seen.
    pub(crate) fn finish(self) {
        let failed = self.failed.load(Ordering::Relaxed);
        match self.state {
            State::Read { .. } if failed => {
                let _ = fs::remove_file(&self.path);
            }
            State::Write { draft, table } if !failed => {
                let Ok(table) = table.into_inner() else { return };
                let (path, bytes) = (self.path.display(), self.layout.file_bytes);
                match draft.publish(&self.path, &self.layout.key, &table) {
                    Ok(()) => tracing::info!("kept rounded weights in {path}, {bytes} bytes"),
                    Err(error) => tracing::warn!("rounded weights are not kept: {path}: {error}"),
                }
            }
            State::Read { .. } | State::Write { .. } => {}
        }
    }
}

fn digest(block: &Matrix) -> Sha {
    Sha256::new().chain_update(block.elements.bytes()).chain_update(block.scales.bytes()).finalize().into()
}

/// Why a file is not read.
enum Refusal {
    Absent,
    Reason(String),
}
impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::NotFound { Self::Absent } else { Self::Reason(error.to_string()) }
    }
}

/// Opens a file of that layout.
fn read_table(path: &Path, layout: &CacheLayout) -> Result<(File, Vec<Sha>), Refusal> {
    let refuse = |reason: String| Err(Refusal::Reason(reason));
    // Asked before opening: opening a pipe would wait for a writer.
    let metadata = path.metadata()?;
    if !metadata.is_file() {
        return refuse("not a regular file".to_owned());
    }
    let file = File::open(path)?;
    let mut header = [0; HEADER_BYTES];
    if metadata.len() < HEADER_BYTES as u64 {
        return refuse(format!("{} bytes are too few", metadata.len()));
    }
    file.read_exact_at(&mut header, 0)?;
    let (magic, rest) = header.split_at(MAGIC.len());
    let (key, table_digest) = rest.split_at(DIGEST_BYTES);
    if magic != MAGIC {
        return refuse("not a file of this version".to_owned());
    }
    if key != layout.key {
        return refuse("of another checkpoint, or of one that has changed".to_owned());
    }
    if metadata.len() != layout.file_bytes {
        return refuse(format!("{} bytes instead of {}", metadata.len(), layout.file_bytes));
    }
    let mut table = vec![[0; DIGEST_BYTES]; layout.blocks];
    file.read_exact_at(table.as_flattened_mut(), HEADER_BYTES as u64)?;
    if Sha256::digest(table.as_flattened())[..] != *table_digest {
        return refuse("its table is damaged".to_owned());
    }
    Ok((file, table))
}

/// A file that is being written, locked against other processes; removed unless it is published.
#[derive(Debug)]
struct Draft {
    file: File,
    path: PathBuf,
    published: bool,
}

impl Draft {
    /// Begins a draft; `None` when another process has one. What a process left that was killed is used again.
    fn begin(target: &Path, file_bytes: u64) -> io::Result<Option<Self>> {
        if let Some(directory) = target.parent() {
            fs::create_dir_all(directory)?;
        }
        let path = target.with_extension("cache.part");
        let file = File::options().read(true).write(true).create(true).truncate(false).open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Ok(None),
            Err(fs::TryLockError::Error(error)) => return Err(error),
        }
        // It may have been published or removed between opening and locking: then it is not ours to write.
        let same = path.metadata().is_ok_and(|there| {
            file.metadata().is_ok_and(|here| (here.dev(), here.ino()) == (there.dev(), there.ino()))
        });
        if !same {
            return Ok(None);
        }
        let draft = Self { file, path, published: false };
        draft.file.set_len(0)?;
        draft.file.set_len(file_bytes)?;
        Ok(Some(draft))
    }

    fn publish(mut self, target: &Path, key: &Sha, table: &[Sha]) -> io::Result<()> {
        let mut header = MAGIC.to_vec();
        header.extend_from_slice(key);
        header.extend_from_slice(&Sha256::digest(table.as_flattened()));
        header.extend_from_slice(table.as_flattened());
        self.file.write_all_at(&header, 0)?;
        fs::rename(&self.path, target)?;
        self.published = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.published {
            let _ = fs::remove_file(&self.path);
        }
    }
}
