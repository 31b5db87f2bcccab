//! The part of the memory plan that lies in host memory.

use std::fmt;

use crate::CacheSpec;
use crate::batch::PAGE_TOKENS;
use crate::plan::{PlanError, readable};

/// What a host store takes of the device's memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct HostMemory {
    /// The device's memory is the host's: the store counts as well.
    pub is_shared: bool,
    /// See [`crate::Device::host_staging_bytes`].
    pub staging_bytes: u64,
}

/// A host store: room for pages and states beside those on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostPlan {
    /// Granules; a page takes one.
    pub granules: usize,
    /// Bytes of each.
    pub granule_bytes: u64,
    /// Granules of a stored state.
    pub state_granules: usize,
    /// Bytes of a stored state, before they are rounded up to granules.
    pub state_bytes: u64,
}

impl HostPlan {
    /// The host store within a number of bytes, which holds a state and a page at least.
    pub(crate) fn within(spec: &CacheSpec, bytes: u64) -> Result<Option<Self>, PlanError> {
        if bytes == 0 {
            return Ok(None);
        }
        let plan = Self {
            granules: usize::try_from(bytes / spec.granule_bytes())
                .unwrap_or(usize::MAX)
                .min(u32::MAX as usize),
            granule_bytes: spec.granule_bytes(),
            state_granules: spec.state_granules(),
            state_bytes: spec.state_bytes(),
        };
        let least = least_host_bytes(spec);
        if bytes < least {
            let (given, least) = (readable(bytes), readable(least));
            return Err(PlanError::Option(format!(
                "a host cache of {given} is too small for a snapshot and a page, which take {least}; 0 does without"
            )));
        }
        Ok(Some(plan))
    }
    /// All of it.
    pub fn bytes(&self) -> u64 {
        self.granule_bytes.saturating_mul(self.granules as u64)
    }
    /// States that fit where no page is moved here.
    pub fn most_states(&self) -> usize {
        self.granules / self.state_granules.max(1)
    }
}

impl fmt::Display for HostPlan {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (states, state) = (self.most_states(), readable(self.state_bytes));
        write!(out, "{}: up to {states} snapshots of {state}", readable(self.bytes()))?;
        write!(out, ", or {} KV tokens", self.granules.saturating_mul(PAGE_TOKENS))
    }
}

/// Bytes of the smallest host store that is of use: a state and a page.
pub fn least_host_bytes(spec: &CacheSpec) -> u64 {
    spec.granule_bytes().saturating_mul(spec.state_granules() as u64 + 1)
}

/// What a refusal says about the host store.
pub(crate) fn host_part(bytes: u64) -> String {
    if bytes == 0 { String::new() } else { format!(", host cache {}", readable(bytes)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Geometry, KvType, StateType};

    #[test]
    fn a_host_cache_that_holds_no_snapshot_is_refused() {
        let geometry = Geometry::named("27b").unwrap();
        let spec = CacheSpec {
            kv_layers: geometry.kv_layers(),
            attention: geometry.attention,
            kv_type: KvType::Bf16,
            pages: 1,
            gdn_layers: geometry.gdn_layers(),
            gdn: geometry.gdn,
            state_type: StateType::F16,
            slots: 1,
        };
        let least = 19 * 4_456_448;
        assert_eq!(least_host_bytes(&spec), least);
        assert_eq!(HostPlan::within(&spec, 0).unwrap(), None);
        assert_eq!(HostPlan::within(&spec, least).unwrap().unwrap().granules, 19);
        let refusal = HostPlan::within(&spec, least - 1).unwrap_err().to_string();
        assert!(refusal.contains("84.7 MB") && refusal.contains("0 does without"), "{refusal}");
        assert_eq!(HostPlan::within(&spec, u64::MAX).unwrap().unwrap().granules, u32::MAX as usize);
    }
}
