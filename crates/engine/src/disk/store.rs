//! The blobs of a directory, and the thread that reads and writes them.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::SystemTime;

use crossbeam_channel::{Receiver, Sender, select, unbounded};

use super::file::{self, HEADER_BYTES, Named};
use super::index::Index;
use super::{BlobKey, DiskCacheError, DiskCacheOptions};

/// Bytes that may wait to be written: a few states of the largest model, a tenth of a second of a fast disk.
const MOST_WAITING_BYTES: u64 = 256 << 20;

/// Locked by the process that uses the directory.
const LOCK_NAME: &str = "lock";

/// What the thread is to do, beside reading.
enum Command {
    Write { name: String, key: BlobKey, contents: Vec<u8> },
    Remove { name: String },
    Touch { name: String },
}

struct ReadCommand {
    name: String,
    key: BlobKey,
    bytes: usize,
}

/// What the thread has done.
enum Done {
    Written { name: String, bytes: u64, outcome: io::Result<()> },
    Read { name: String, key: BlobKey, contents: Option<Vec<u8>> },
}

/// A blob that was asked for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Which.
    pub(crate) key: BlobKey,
    /// `None` where the file was gone or not sound; it is forgotten then.
    pub(crate) contents: Option<Vec<u8>>,
}

/// What is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DiskUsage {
    /// Blobs.
    pub(crate) files: usize,
    /// Of their files.
    pub(crate) bytes: u64,
}

/// The engine's end of a directory of blobs. Nothing here waits for the disk but [`DiskCache::open`] and dropping it, which
/// writes what still waits.
pub(crate) struct DiskCache {
    options: DiskCacheOptions,
    index: Index,
    /// Bytes of each blob that waits to be written or is being written.
    writing: HashMap<String, u64>,
    waiting_bytes: u64,
    thread: Option<Thread>,
    done: Receiver<Done>,
    /// Locked for as long as it is open.
    _lock: File,
}

struct Thread {
    reads: Sender<ReadCommand>,
    others: Sender<Command>,
    handle: JoinHandle<()>,
}

impl DiskCache {
    /// Takes a directory and sees what is there. Files of ours that were not finished are removed, others are left alone.
    pub(crate) fn open(options: DiskCacheOptions) -> Result<Self, DiskCacheError> {
        let directory = &options.directory;
        let fail = |reason| DiskCacheError::Directory { directory: directory.clone(), reason };
        fs::create_dir_all(directory).map_err(fail)?;
        let lock = File::options().create(true).append(true).open(directory.join(LOCK_NAME)).map_err(fail)?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(DiskCacheError::InUse(directory.clone())),
            Err(fs::TryLockError::Error(error)) => return Err(fail(error)),
        }
        let mut index = Index::new(options.limit_bytes);
        for (_, name, bytes) in scan(directory).map_err(fail)? {
            index.add(name, bytes);
        }
        let (reads, read_commands) = unbounded();
        let (others, commands) = unbounded();
        let (finished, done) = unbounded();
        let worker = Worker { directory: directory.clone(), identity: options.identity, finished };
        let handle = std::thread::Builder::new()
            .name("disk cache".to_owned())
            .spawn(move || worker.run(&read_commands, &commands))
            .map_err(fail)?;
        let mut cache = Self {
            options,
            index,
            writing: HashMap::new(),
            waiting_bytes: 0,
            thread: Some(Thread { reads, others, handle }),
            done,
            _lock: lock,
        };
        let too_many = cache.index.shrink();
        cache.remove_files(too_many);
        Ok(cache)
    }

    /// What is kept now.
    pub(crate) fn usage(&self) -> DiskUsage {
        DiskUsage { files: self.index.files(), bytes: self.index.total_bytes() }
    }

    /// Whether a blob is there; whether it is sound shows when it is read.
    pub(crate) fn contains(&self, key: &BlobKey) -> bool {
        self.index.contains(&self.name(key))
    }

    /// Whether a blob is there or on its way.
    pub(crate) fn knows(&self, key: &BlobKey) -> bool {
        let name = self.name(key);
        self.index.contains(&name) || self.writing.contains_key(&name)
    }

    /// Whether blobs wait to be written.
    pub(crate) fn is_writing(&self) -> bool {
        !self.writing.is_empty()
    }

    /// Whether a blob of so many bytes may be given to [`DiskCache::put`] now.
    pub(crate) fn has_room(&self, bytes: usize) -> bool {
        self.waiting_bytes == 0 || self.waiting_bytes + bytes as u64 <= MOST_WAITING_BYTES
    }

    /// Keeps a blob: others that were not used for longest make room. What is known already is not written again. False
    /// where it is larger than the limit leaves room for.
    pub(crate) fn put(&mut self, key: &BlobKey, contents: Vec<u8>) -> bool {
        if self.knows(key) {
            return true;
        }
        let (name, bytes) = (self.name(key), (contents.len() + HEADER_BYTES) as u64);
        let Some(gone) = self.index.reserve(bytes) else { return false };
        self.remove_files(gone);
        self.writing.insert(name.clone(), bytes);
        self.waiting_bytes += bytes;
        self.command(Command::Write { name, key: *key, contents });
        true
    }

    /// Asks for a blob of so many bytes; [`DiskCache::poll`] will have it.
    pub(crate) fn get(&mut self, key: &BlobKey, bytes: usize) {
        let command = ReadCommand { name: self.name(key), key: *key, bytes };
        if let Some(thread) = &self.thread {
            // It ends with this value alone.
            let _ = thread.reads.send(command);
        }
    }

    /// Makes a blob the most recently used.
    pub(crate) fn touch(&mut self, key: &BlobKey) {
        let name = self.name(key);
        if self.index.touch(&name) {
            self.command(Command::Touch { name });
        }
    }

    /// Blobs that have come since the last call.
    pub(crate) fn poll(&mut self) -> Vec<Finished> {
        let mut read = Vec::new();
        while let Ok(done) = self.done.try_recv() {
            match done {
                Done::Written { name, bytes, outcome } => self.written(name, bytes, outcome),
                Done::Read { name, key, contents } => {
                    if contents.is_none() {
                        self.index.remove(&name);
                    }
                    read.push(Finished { key, contents });
                }
            }
        }
        read
    }

    fn written(&mut self, name: String, bytes: u64, outcome: io::Result<()>) {
        self.writing.remove(&name);
        self.waiting_bytes -= bytes;
        self.index.give_back(bytes);
        match outcome {
            Ok(()) => self.index.add(name, bytes),
            Err(error) => {
                self.index.limit_to_now();
                let directory = self.options.directory.display();
                let kept = self.index.total_bytes();
                tracing::warn!("disk cache {directory}: {error}; it keeps {kept} bytes at most from now on");
            }
        }
    }

    fn remove_files(&mut self, names: Vec<String>) {
        for name in names {
            self.command(Command::Remove { name });
        }
    }

    fn command(&self, command: Command) {
        if let Some(thread) = &self.thread {
            // It ends with this value alone.
            let _ = thread.others.send(command);
        }
    }

    fn name(&self, key: &BlobKey) -> String {
        file::name(&self.options.identity, key)
    }
}

impl Drop for DiskCache {
    fn drop(&mut self) {
        if let Some(Thread { reads, others, handle }) = self.thread.take() {
            drop((reads, others));
            let _ = handle.join();
        }
    }
}

/// Our files with their sizes, the one not used for longest first.
fn scan(directory: &Path) -> io::Result<Vec<(SystemTime, String, u64)>> {
    let mut files = Vec::new();
    let mut foreign = 0;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Some(name) = entry.file_name().to_str().map(str::to_owned) else { continue };
        // Of a link it is the link's own, so that nothing outside is read or removed.
        let Ok(metadata) = entry.metadata() else { continue };
        match file::named(&name) {
            Named::Blob if metadata.is_file() => {
                let used = metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((used, name, metadata.len()));
            }
            Named::Draft if metadata.is_file() => {
                let _ = fs::remove_file(entry.path());
            }
            _ if name == LOCK_NAME => {}
            _ => foreign += 1,
        }
    }
    if foreign > 0 {
        tracing::warn!(
            "disk cache {}: {foreign} files are of something else, left alone",
            directory.display()
        );
    }
    files.sort();
    Ok(files)
}

/// What the thread knows.
struct Worker {
    directory: PathBuf,
    identity: [u8; 32],
    finished: Sender<Done>,
}

impl Worker {
    /// Works until nobody can ask any more. Somebody waits for what is read, so that goes first.
    fn run(&self, reads: &Receiver<ReadCommand>, others: &Receiver<Command>) {
        loop {
            if let Ok(command) = reads.try_recv() {
                self.read(command);
                continue;
            }
            select! {
                recv(reads) -> command => match command {
                    Ok(command) => self.read(command),
                    Err(_) => break,
                },
                recv(others) -> command => match command {
                    Ok(command) => self.work(command),
                    Err(_) => break,
                },
            }
        }
        // What was asked for before the end is done: it is wanted after a restart.
        others.iter().for_each(|command| self.work(command));
    }

    fn work(&self, command: Command) {
        match command {
            Command::Write { name, key, contents } => {
                let bytes = (contents.len() + HEADER_BYTES) as u64;
                let outcome = self.write(&name, &key, &contents);
                let _ = self.finished.send(Done::Written { name, bytes, outcome });
            }
            Command::Remove { name } => {
                let _ = fs::remove_file(self.directory.join(name));
            }
            Command::Touch { name } => {
                let file = File::options().append(true).open(self.directory.join(name));
                let _ = file.and_then(|file| file.set_modified(SystemTime::now()));
            }
        }
    }

    /// A file is whole or not there. It is not flushed first: if power fails, its digest tells.
    fn write(&self, name: &str, key: &BlobKey, contents: &[u8]) -> io::Result<()> {
        let draft = self.directory.join(file::draft_name(name));
        let write = || -> io::Result<()> {
            let mut file = File::create(&draft)?;
            file.write_all(&file::header(&self.identity, key, contents))?;
            file.write_all(contents)?;
            drop(file);
            fs::rename(&draft, self.directory.join(name))
        };
        write().inspect_err(|_| {
            let _ = fs::remove_file(&draft);
        })
    }

    fn read(&self, ReadCommand { name, key, bytes }: ReadCommand) {
        let path = self.directory.join(&name);
        let contents = match self.contents(&path, &key, bytes) {
            Ok(contents) => Some(contents),
            Err(reason) => {
                tracing::warn!("disk cache: {} is not used and removed: {reason}", path.display());
                let _ = fs::remove_file(&path);
                None
            }
        };
        let _ = self.finished.send(Done::Read { name, key, contents });
    }

    fn contents(&self, path: &Path, key: &BlobKey, bytes: usize) -> Result<Vec<u8>, String> {
        // Asked before reading: a pipe would wait for a writer, and a wrong length need not be read.
        let metadata = fs::symlink_metadata(path).map_err(|error| error.to_string())?;
        if !metadata.is_file() || metadata.len() != (HEADER_BYTES + bytes) as u64 {
            return Err(format!("{} bytes instead of {}", metadata.len(), HEADER_BYTES + bytes));
        }
        let whole = fs::read(path).map_err(|error| error.to_string())?;
        file::contents(whole, &self.identity, key, bytes).map_err(str::to_owned)
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::disk::PathKeys;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn key(number: u32) -> BlobKey {
        PathKeys::new(None, &[number], &[1]).state(1).unwrap()
    }

    fn contents(number: u32, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at as u32).wrapping_mul(31).wrapping_add(number) as u8).collect()
    }

    fn options(directory: &Path, limit_bytes: u64) -> DiskCacheOptions {
        DiskCacheOptions { directory: directory.to_owned(), limit_bytes, identity: [3; 32] }
    }

    fn open(directory: &Path) -> DiskCache {
        DiskCache::open(options(directory, 1 << 20)).unwrap()
    }

    fn until<T>(cache: &mut DiskCache, mut look: impl FnMut(&mut DiskCache) -> Option<T>) -> T {
        let started = Instant::now();
        loop {
            if let Some(found) = look(cache) {
                return found;
            }
            assert!(started.elapsed() < PATIENCE, "nothing has come");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn read(cache: &mut DiskCache, number: u32, bytes: usize) -> Option<Vec<u8>> {
        cache.get(&key(number), bytes);
        until(cache, |cache| {
            cache.poll().into_iter().find(|finished| finished.key == key(number)).map(|found| found.contents)
        })
    }

    fn write(cache: &mut DiskCache, number: u32, bytes: usize) {
        assert!(cache.put(&key(number), contents(number, bytes)));
        until(cache, |cache| {
            cache.poll();
            cache.writing.is_empty().then_some(())
        });
    }

    fn names(directory: &Path) -> Vec<String> {
        let mut names: Vec<String> = fs::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn blobs_survive_the_process() {
        let directory = tempfile::tempdir().unwrap();
        let mut cache = open(directory.path());
        for number in 0..5 {
            assert!(cache.put(&key(number), contents(number, 1000)));
        }
        assert!(cache.knows(&key(4)));
        // What waits is written first.
        drop(cache);
        let mut cache = open(directory.path());
        assert_eq!(cache.usage(), DiskUsage { files: 5, bytes: 5 * (1000 + HEADER_BYTES as u64) });
        for number in 0..5 {
            assert!(cache.contains(&key(number)));
            assert_eq!(read(&mut cache, number, 1000).unwrap(), contents(number, 1000));
        }
        assert!(!cache.contains(&key(9)));
        assert_eq!(read(&mut cache, 9, 1000), None);
    }

    #[test]
    fn one_process_uses_a_directory() {
        let directory = tempfile::tempdir().unwrap();
        let cache = open(directory.path());
        let refusal = DiskCache::open(options(directory.path(), 1)).err().unwrap();
        assert!(matches!(refusal, DiskCacheError::InUse(_)), "{refusal}");
        drop(cache);
        open(directory.path());
    }

    #[test]
    fn a_directory_that_cannot_be_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let refusal = DiskCache::open(options(file.path(), 1)).err().unwrap();
        assert!(matches!(refusal, DiskCacheError::Directory { .. }), "{refusal}");
    }

    #[test]
    fn damaged_files_are_removed_and_others_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let mut cache = open(directory.path());
        for number in 0..3 {
            write(&mut cache, number, 500);
        }
        drop(cache);
        let path = |number| directory.path().join(file::name(&[3; 32], &key(number)));
        let mut damaged = fs::read(path(0)).unwrap();
        damaged[300] ^= 1;
        fs::write(path(0), damaged).unwrap();
        fs::write(path(1), b"short").unwrap();
        let draft = directory.path().join(file::draft_name(&file::name(&[3; 32], &key(7))));
        fs::write(&draft, b"half").unwrap();
        for foreign in ["notes.txt", "x.prefix"] {
            fs::write(directory.path().join(foreign), b"mine").unwrap();
        }
        fs::create_dir(directory.path().join("folder")).unwrap();
        std::os::unix::fs::symlink("/etc/hostname", path(8)).unwrap();

        let mut cache = open(directory.path());
        assert!(!draft.exists());
        assert_eq!(cache.usage().files, 3);
        assert_eq!(read(&mut cache, 0, 500), None);
        assert_eq!(read(&mut cache, 1, 500), None);
        assert_eq!(read(&mut cache, 2, 500).unwrap(), contents(2, 500));
        assert_eq!(cache.usage().files, 1);
        assert!(!path(0).exists() && !path(1).exists());
        write(&mut cache, 0, 500);
        assert_eq!(read(&mut cache, 0, 500).unwrap(), contents(0, 500));
        drop(cache);
        let left = names(directory.path());
        assert!(
            ["notes.txt", "x.prefix", "folder", "lock"].iter().all(|name| left.contains(&(*name).to_owned()))
        );
    }

    #[test]
    fn another_models_files_are_not_read_but_make_room() {
        let directory = tempfile::tempdir().unwrap();
        let mut cache = open(directory.path());
        write(&mut cache, 0, 500);
        drop(cache);
        let limit_bytes = 2 * (500 + HEADER_BYTES) as u64;
        let other = DiskCacheOptions { identity: [4; 32], ..options(directory.path(), limit_bytes) };
        let mut cache = DiskCache::open(other).unwrap();
        assert_eq!((cache.usage().files, cache.contains(&key(0))), (1, false));
        write(&mut cache, 1, 500);
        write(&mut cache, 2, 500);
        assert!(cache.contains(&key(1)) && cache.contains(&key(2)));
        drop(cache);
        assert_eq!(names(directory.path()).len(), 3);
    }

    #[test]
    fn what_was_not_used_for_longest_goes_also_after_a_restart() {
        let directory = tempfile::tempdir().unwrap();
        let limit_bytes = 3 * (500 + HEADER_BYTES) as u64;
        let mut cache = DiskCache::open(options(directory.path(), limit_bytes)).unwrap();
        for number in 0..3 {
            write(&mut cache, number, 500);
        }
        cache.touch(&key(0));
        write(&mut cache, 3, 500);
        assert!(cache.contains(&key(0)) && !cache.contains(&key(1)));
        // Times of files decide after a restart.
        let name = |number| file::name(&[3; 32], &key(number));
        drop(cache);
        for (number, seconds) in [(0, 300), (3, 200), (2, 100)] {
            let file = File::options().append(true).open(directory.path().join(name(number))).unwrap();
            file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).unwrap();
        }
        let two = 2 * (500 + HEADER_BYTES) as u64;
        let cache = DiskCache::open(options(directory.path(), two)).unwrap();
        assert!(!cache.contains(&key(2)) && cache.contains(&key(3)) && cache.contains(&key(0)));
        drop(cache);
        assert!(!directory.path().join(name(2)).exists());
        assert!(!DiskCache::open(options(directory.path(), 1)).unwrap().contains(&key(0)));
    }

    #[test]
    fn a_disk_that_takes_no_more_is_no_failure() {
        let directory = tempfile::tempdir().unwrap();
        let inner = directory.path().join("inner");
        let mut cache = open(&inner);
        write(&mut cache, 0, 500);
        fs::remove_dir_all(&inner).unwrap();
        write(&mut cache, 1, 500);
        assert!(!cache.knows(&key(1)));
        // From now on it keeps what it had: a new file replaces an old one.
        fs::create_dir(&inner).unwrap();
        write(&mut cache, 2, 500);
        assert!(cache.contains(&key(2)) && !cache.contains(&key(0)));
        assert!(!cache.put(&key(3), contents(3, 501)), "more than there was");
    }

    #[test]
    fn what_waits_is_bounded() {
        let directory = tempfile::tempdir().unwrap();
        let mut cache = DiskCache::open(options(directory.path(), 1 << 40)).unwrap();
        assert!(cache.has_room(usize::MAX >> 1), "one blob may have any size");
        cache.waiting_bytes = MOST_WAITING_BYTES - 10;
        assert!(cache.has_room(10) && !cache.has_room(11));
        cache.waiting_bytes = 0;
    }
}
