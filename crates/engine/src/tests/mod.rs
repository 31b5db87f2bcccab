mod answers;
mod caching;
#[allow(dead_code, reason = "the tests on real devices use it too")]
mod client;
mod disk;
mod distribution;
mod drafts;
mod faults;
mod guides;
mod harness;
mod lifecycle;
mod puppet;
mod requests;
