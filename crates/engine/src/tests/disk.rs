//! What outlives an engine: the next one on the same directory begins where the last one was, and nothing on disk
//! changes an answer.

use std::path::Path;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use qwill_contract::Request;

use super::harness::{Bench, any_request, ask, asking, conversation, message, options};
use crate::disk::{DiskCache, DiskCacheOptions};
use crate::{DiskCacheError, EngineOptions};

fn with_disk(directory: &Path, limit_bytes: u64) -> EngineOptions {
    let disk = DiskCacheOptions { directory: directory.to_owned(), limit_bytes, identity: [1; 32] };
    EngineOptions { disk_cache: Some(disk), ..options() }
}

/// A process: its engine has the directory until it is dropped.
fn start(directory: &Path, granules: usize, limit_bytes: u64) -> Bench {
    let options = with_disk(directory, limit_bytes);
    let disk = DiskCache::open(options.disk_cache.clone().unwrap()).unwrap();
    let mut bench = Bench::with_host(options, granules);
    bench.engine.attach_disk(disk).unwrap();
    bench
}

fn loads(bench: &Bench) -> u64 {
    bench.handle.load().cache.disk_loads.load(Ordering::Relaxed)
}

#[test]
fn a_conversation_goes_on_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let mut chat = [message(150, 9), message(5, 10)].concat();
    for turn in 0..4 {
        let mut bench = start(directory.path(), 40, 1 << 20);
        let outcome = ask(&mut bench, &asking(&chat, 90));
        assert_eq!(loads(&bench), u64::from(turn > 0));
        assert_eq!(outcome.cached_tokens > 100 * turn, turn > 0, "turn {turn}: {}", outcome.cached_tokens);
        let again = ask(&mut bench, &asking(&chat, 90));
        assert!(again.cached_tokens >= outcome.cached_tokens && loads(&bench) <= 1, "now it is in memory");
        chat.extend(outcome.ids(0));
        chat.extend(message(30, 30 + turn as u32));
        bench.assert_nothing_is_left();
    }
}

#[test]
fn what_the_host_store_has_no_room_for_comes_back_from_disk() {
    let directory = tempfile::tempdir().unwrap();
    let mut bench = start(directory.path(), 8, 1 << 20);
    let prompts: Vec<Vec<u32>> = (0..6).map(|number| message(200, 20 + number)).collect();
    for prompt in &prompts {
        assert_eq!(ask(&mut bench, &asking(prompt, 5)).cached_tokens, 0);
    }
    for prompt in &prompts {
        assert_eq!(ask(&mut bench, &asking(prompt, 5)).cached_tokens, 192);
    }
    assert!(loads(&bench) > 0);
    bench.assert_nothing_is_left();
}

#[test]
fn salts_share_nothing_on_disk_either() {
    let directory = tempfile::tempdir().unwrap();
    let salted = |salt: Option<&str>| Request { cache_salt: salt.map(Into::into), ..asking(&[9; 150], 5) };
    ask(&mut start(directory.path(), 40, 1 << 20), &salted(Some("a")));
    for (salt, cached) in [(None, 0), (Some("b"), 0), (Some("a"), 128)] {
        let mut bench = start(directory.path(), 40, 1 << 20);
        assert_eq!(ask(&mut bench, &salted(salt)).cached_tokens, cached);
    }
}

#[test]
fn damaged_files_cost_time_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let chat = [message(150, 9), message(5, 10)].concat();
    ask(&mut start(directory.path(), 40, 1 << 20), &asking(&chat, 20));
    let files: Vec<_> =
        std::fs::read_dir(directory.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(files.len() > 4);
    for path in files.iter().filter(|path| path.extension().is_some()) {
        let mut bytes = std::fs::read(path).unwrap();
        let last = bytes.len() - 1;
        bytes[last] ^= 1;
        std::fs::write(path, bytes).unwrap();
    }
    let mut bench = start(directory.path(), 40, 1 << 20);
    assert_eq!(ask(&mut bench, &asking(&chat, 20)).cached_tokens, 0);
    assert_eq!(loads(&bench), 0);
    drop(bench);
    // It was written anew.
    let mut bench = start(directory.path(), 40, 1 << 20);
    assert!(ask(&mut bench, &asking(&chat, 20)).cached_tokens > 0);
    bench.assert_nothing_is_left();
}

#[test]
fn a_directory_in_use_is_refused_at_start() {
    let directory = tempfile::tempdir().unwrap();
    let _bench = start(directory.path(), 40, 1 << 20);
    let build = || -> Result<super::puppet::Puppet, std::io::Error> { unreachable!("refused before") };
    let refusal = crate::start(with_disk(directory.path(), 1), build).err().unwrap();
    assert!(matches!(&refusal, crate::EngineError::Disk(DiskCacheError::InUse(_))), "{refusal}");
}

#[test]
fn a_prompt_that_waits_for_the_disk_may_be_cancelled() {
    let directory = tempfile::tempdir().unwrap();
    let prompt = conversation(1, 300);
    ask(&mut start(directory.path(), 40, 1 << 20), &asking(&prompt, 5));
    let mut bench = start(directory.path(), 40, 1 << 20);
    let request = asking(&prompt, 5);
    let cancel = request.cancel.clone();
    let client = bench.submit(request);
    cancel.cancel();
    bench.finish();
    assert!(client.wait().ids(0).is_empty());
    bench.assert_nothing_is_left();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Whatever is asked, with memory too small for it, little room on disk and restarts in between.
    #[test]
    fn nothing_on_disk_changes_an_answer(
        requests in prop::collection::vec((any_request(), any::<bool>()), 1..10),
        granules in 3usize..30,
        limit_kib in 2u64..40,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut bench = Some(start(directory.path(), granules, limit_kib << 10));
        for (request, restart) in requests {
            if restart {
                drop(bench.take());
                bench = Some(start(directory.path(), granules, limit_kib << 10));
            }
            if let Some(bench) = &mut bench {
                ask(bench, &request);
            }
        }
        bench.unwrap().assert_nothing_is_left();
        let files = std::fs::read_dir(directory.path()).unwrap();
        let bytes: u64 = files.map(|entry| entry.unwrap().metadata().unwrap().len()).sum();
        prop_assert!(bytes <= limit_kib << 10, "{bytes} bytes on disk");
    }
}
