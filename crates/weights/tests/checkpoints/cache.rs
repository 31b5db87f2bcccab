//! Rounded weights on disk: used when they are right, never believed when they are not.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use qwill_weights::{Block, Checkpoint, Quantize, StreamOptions, WeightCache, WeightsError, stream};

use crate::builder::{Directory, micro_config, micro_tensors};

const OPTIONS: StreamOptions = StreamOptions { workers: 3, block_bytes: 20_000 };

/// Everything that a stream delivers, as text, in the order of matrices and rows.
fn delivered(directory: &Path, quantize: Quantize, cache: WeightCache) -> Vec<String> {
    let checkpoint = Checkpoint::open(directory).unwrap().with_cache(cache);
    let mut blocks = Vec::new();
    let mut place = |block: Block<'_>| -> Result<(), WeightsError> {
        blocks.push(((block.matrix, block.first_row), format!("{:?}", block.data)));
        Ok(())
    };
    stream(&checkpoint, &checkpoint.matrices(), quantize, OPTIONS, &mut place).unwrap();
    blocks.sort();
    blocks.into_iter().map(|(_, data)| data).collect()
}

fn rounded(directory: &Path, cache: WeightCache) -> Vec<String> {
    delivered(directory, Quantize::Int4, cache)
}

fn checkpoint() -> Directory {
    Directory::sharded(&micro_config(), &micro_tensors())
}

fn cache_file(directory: &Directory) -> PathBuf {
    directory.path().join("qwill-int4.cache")
}

/// Names in a directory that are not a checkpoint's.
fn caches(directory: &Path) -> Vec<String> {
    let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.retain(|name| name.contains("cache"));
    names.sort();
    names
}

/// Changes what the weights say and nothing that their cache can see: what is read from them from now on is wrong.
fn spoil_unseen(directory: &Directory) {
    for name in ["model-0.safetensors", "model-1.safetensors"] {
        let path = directory.path().join(name);
        let changed = path.metadata().unwrap().modified().unwrap();
        let mut bytes = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        bytes[header..].fill(0);
        fs::write(&path, bytes).unwrap();
        File::options().write(true).open(&path).unwrap().set_modified(changed).unwrap();
    }
}

#[test]
fn the_second_time_rounded_weights_come_from_the_cache() {
    let directory = checkpoint();
    let expected = rounded(directory.path(), WeightCache::Off);
    assert!(caches(directory.path()).is_empty());
    assert!(rounded(directory.path(), WeightCache::Beside) == expected);
    assert_eq!(caches(directory.path()), ["qwill-int4.cache"]);
    spoil_unseen(&directory);
    let again = rounded(directory.path(), WeightCache::Beside);
    let differ = again.iter().zip(&expected).filter(|(a, b)| a != b).count();
    // The projections of the gates are not rounded, so they are the checkpoint's, which are zeros now.
    assert_eq!(differ, 2);
    assert!(rounded(directory.path(), WeightCache::Off) != expected);
}

#[test]
fn nothing_is_kept_when_nothing_is_rounded() {
    let directory = checkpoint();
    delivered(directory.path(), Quantize::None, WeightCache::Beside);
    assert!(caches(directory.path()).is_empty());
}

#[test]
fn a_directory_of_caches_tells_checkpoints_and_roundings_apart() {
    let (one, two, caches_of) = (checkpoint(), checkpoint(), tempfile::tempdir().unwrap());
    let place = caches_of.path().join("made/when/needed");
    let cache = || WeightCache::In(place.clone());
    for directory in [&one, &two] {
        for quantize in [Quantize::Int4, Quantize::Int8] {
            let expected = delivered(directory.path(), quantize, WeightCache::Off);
            for _ in 0..2 {
                assert!(delivered(directory.path(), quantize, cache()) == expected);
            }
        }
    }
    assert_eq!(caches(&place).len(), 4);
    assert!(caches(one.path()).is_empty());
}

#[test]
fn a_changed_byte_is_noticed_wherever_it_is() {
    let directory = checkpoint();
    let expected = rounded(directory.path(), WeightCache::Beside);
    let good = fs::read(cache_file(&directory)).unwrap();
    let table = 8 + 64;
    let places = [0, 7, 8, 39, 40, 71, table, table + 33, good.len() / 2, good.len() - 1];
    for at in places {
        let mut bad = good.clone();
        bad[at] ^= 0x10;
        fs::write(cache_file(&directory), bad).unwrap();
        assert!(rounded(directory.path(), WeightCache::Beside) == expected, "byte {at}");
        // Written anew at once where nothing of it was used, else the next time.
        assert!(rounded(directory.path(), WeightCache::Beside) == expected, "byte {at}, again");
        assert!(fs::read(cache_file(&directory)).unwrap() == good, "byte {at}");
    }
    assert_eq!(caches(directory.path()), ["qwill-int4.cache"]);
}

#[test]
fn a_file_of_another_length_is_written_anew() {
    let directory = checkpoint();
    let expected = rounded(directory.path(), WeightCache::Beside);
    let good = fs::read(cache_file(&directory)).unwrap();
    for len in [0, 1, 71, 72, 100, good.len() - 1, good.len() + 1] {
        let mut bad = good.clone();
        bad.resize(len, 0);
        fs::write(cache_file(&directory), bad).unwrap();
        assert!(rounded(directory.path(), WeightCache::Beside) == expected, "{len} bytes");
        assert!(fs::read(cache_file(&directory)).unwrap() == good, "{len} bytes");
    }
}

#[test]
fn a_changed_checkpoint_has_another_cache() {
    let directory = checkpoint();
    rounded(directory.path(), WeightCache::Beside);
    let old = fs::read(cache_file(&directory)).unwrap();
    // Another time, same contents.
    let shard = File::options().write(true).open(directory.path().join("model-1.safetensors")).unwrap();
    shard.set_modified(SystemTime::now() + Duration::from_secs(7)).unwrap();
    rounded(directory.path(), WeightCache::Beside);
    let touched = fs::read(cache_file(&directory)).unwrap();
    assert!(touched != old && touched.len() == old.len());
    // Other contents.
    let mut tensors = micro_tensors();
    tensors.get_mut("model.layers.1.mlp.up_proj.weight").unwrap().bytes[0] ^= 1;
    let other = Directory::sharded(&micro_config(), &tensors);
    for name in ["model-0.safetensors", "model-1.safetensors"] {
        fs::copy(other.path().join(name), directory.path().join(name)).unwrap();
    }
    let expected = rounded(directory.path(), WeightCache::Off);
    assert!(rounded(directory.path(), WeightCache::Beside) == expected);
    assert!(rounded(directory.path(), WeightCache::Beside) == expected);
}

#[test]
fn several_may_write_at_once() {
    let directory = checkpoint();
    let expected = rounded(directory.path(), WeightCache::Off);
    for _ in 0..5 {
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| assert!(rounded(directory.path(), WeightCache::Beside) == expected));
            }
        });
        assert_eq!(caches(directory.path()), ["qwill-int4.cache"]);
        spoil_nothing_and_read(&directory, &expected);
        fs::remove_file(cache_file(&directory)).unwrap();
    }
}

/// The file is complete: reading it needs no second attempt, which would remove it.
fn spoil_nothing_and_read(directory: &Directory, expected: &[String]) {
    let before = fs::read(cache_file(directory)).unwrap();
    assert!(rounded(directory.path(), WeightCache::Beside) == expected);
    assert!(fs::read(cache_file(directory)).unwrap() == before);
}

#[test]
fn what_a_killed_process_left_is_used_again() {
    let directory = checkpoint();
    let draft = directory.path().join("qwill-int4.cache.part");
    fs::write(&draft, vec![7; 10_000_000]).unwrap();
    let expected = rounded(directory.path(), WeightCache::Off);
    assert!(rounded(directory.path(), WeightCache::Beside) == expected);
    assert_eq!(caches(directory.path()), ["qwill-int4.cache"]);
    spoil_nothing_and_read(&directory, &expected);
}

#[test]
fn without_a_place_to_write_weights_load_all_the_same() {
    let directory = checkpoint();
    let expected = rounded(directory.path(), WeightCache::Off);
    let file = directory.path().join("config.json");
    assert!(rounded(directory.path(), WeightCache::In(file.join("below"))) == expected);
    // A directory that may not be written, except by root, who may.
    let locked = tempfile::tempdir().unwrap();
    let mut permissions = fs::metadata(locked.path()).unwrap().permissions();
    permissions.set_readonly(true);
    fs::set_permissions(locked.path(), permissions).unwrap();
    assert!(rounded(directory.path(), WeightCache::In(locked.path().to_owned())) == expected);
    // Something else lies there.
    fs::create_dir(cache_file(&directory)).unwrap();
    assert!(rounded(directory.path(), WeightCache::Beside) == expected);
}

#[test]
fn a_stream_that_fails_leaves_no_cache() {
    let directory = checkpoint();
    let checkpoint = Checkpoint::open(directory.path()).unwrap().with_cache(WeightCache::Beside);
    let mut left = 4;
    let mut place = |_: Block<'_>| {
        left -= 1;
        if left == 0 {
            Err(WeightsError::Threads { source: std::io::ErrorKind::Other.into() })
        } else {
            Ok(())
        }
    };
    assert!(stream(&checkpoint, &checkpoint.matrices(), Quantize::Int4, OPTIONS, &mut place).is_err());
    assert!(caches(directory.path()).is_empty());
}
