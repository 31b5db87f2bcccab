//! Moving states and pages: copies must be exact and touch nothing else.

use super::{Bench, Failure, Random};
use crate::batch::{CONV_RING, PAGE_TOKENS};
use crate::numeric::{bf16_to_f32, f16_to_f32, f32_to_bf16, quantize_vector};
use crate::{CacheSpec, Device, GdnState, Geometry, KvPage, KvType, RING_TOKENS, StateType};

/// What a cache should hold: `[layer][slot]` and `[layer][page]`.
pub(super) struct Expected {
    pub(super) states: Vec<Vec<GdnState>>,
    pub(super) pages: Vec<Vec<KvPage>>,
}

impl Expected {
    pub(super) fn check<D: Device>(
        &self,
        device: &mut D,
        cache: &D::Cache,
        after: &str,
    ) -> Result<(), Failure> {
        let same = |a: &[f32], b: &[f32]| {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
        };
        for (layer, slots) in self.states.iter().enumerate() {
            for (slot, expected) in slots.iter().enumerate() {
                let found = device.read_state(cache, layer, slot)?;
                let parts = [
                    ("base state", &found.base, &expected.base),
                    ("ring", &found.ring, &expected.ring),
                    ("conv ring", &found.conv, &expected.conv),
                ];
                for (part, found, expected) in parts {
                    if !same(found, expected) {
                        return Err(Failure::new(format!(
                            "{part} of layer {layer} slot {slot} is wrong {after}"
                        )));
                    }
                }
            }
        }
        for (layer, pages) in self.pages.iter().enumerate() {
            for (page, expected) in pages.iter().enumerate() {
                let found = device.read_page(cache, layer, page)?;
                if !same(&found.keys, &expected.keys) || !same(&found.values, &expected.values) {
                    return Err(Failure::new(format!("layer {layer} page {page} is wrong {after}")));
                }
            }
        }
        Ok(())
    }
}

pub(super) fn random_state(random: &mut Random, spec: &CacheSpec) -> GdnState {
    GdnState {
        base: random.normals(spec.gdn.state_elements(), 1.0),
        ring: random.normals(RING_TOKENS * spec.gdn.ring_entry(), 1.0),
        conv: random.normals(CONV_RING * spec.gdn.conv_channels(), 1.0),
    }
}

/// A head's vector as it is after quantising.
fn through_codes(values: &[f32]) -> Vec<f32> {
    let mut codes = vec![0; values.len()];
    let scale = f16_to_f32(quantize_vector(values, &mut codes));
    codes.into_iter().map(|code| f32::from(code) * scale).collect()
}

/// A page whose values the KV type can hold, and the one to write for it.
pub(super) fn random_page(random: &mut Random, spec: &CacheSpec) -> (KvPage, KvPage) {
    let elements = PAGE_TOKENS * spec.attention.kv_columns();
    let written = KvPage { keys: random.normals(elements, 1.0), values: random.normals(elements, 1.0) };
    let stored = |values: &[f32]| match spec.kv_type {
        KvType::F32 => values.to_vec(),
        KvType::Bf16 => values.iter().map(|value| bf16_to_f32(f32_to_bf16(*value))).collect(),
        KvType::Int8 => values.chunks(spec.attention.head_dim).flat_map(through_codes).collect(),
    };
    (KvPage { keys: stored(&written.keys), values: stored(&written.values) }, written)
}

pub(super) fn fill<D: Device>(
    device: &mut D,
    cache: &mut D::Cache,
    random: &mut Random,
    spec: &CacheSpec,
) -> Result<Expected, Failure> {
    let mut expected = Expected { states: Vec::new(), pages: Vec::new() };
    for layer in 0..spec.gdn_layers {
        let states: Vec<GdnState> = (0..spec.slots).map(|_| random_state(random, spec)).collect();
        for (slot, state) in states.iter().enumerate() {
            device.write_state(cache, layer, slot, state)?;
        }
        let stored = states.into_iter().map(|state| state.rounded(&spec.gdn, spec.state_type));
        expected.states.push(stored.collect());
    }
    for layer in 0..spec.kv_layers {
        let mut stored_pages = Vec::new();
        for page in 0..spec.pages {
            let (stored, written) = random_page(random, spec);
            device.write_page(cache, layer, page, &written)?;
            stored_pages.push(stored);
        }
        expected.pages.push(stored_pages);
    }
    Ok(expected)
}

fn check_one<D: Device>(device: &mut D, random: &mut Random, spec: &CacheSpec) -> Result<(), Failure> {
    let mut cache = device.cache(spec)?;
    for layer in 0..spec.gdn_layers {
        for slot in 0..spec.slots {
            if device.read_state(&cache, layer, slot)?.base.iter().any(|value| *value != 0.0) {
                return Err(Failure::new(format!("layer {layer} slot {slot} of a new cache is not clear")));
            }
        }
    }
    let mut expected = fill(device, &mut cache, random, spec)?;
    expected.check(device, &cache, "after writing all")?;

    device.copy_slot(&mut cache, 2, 0)?;
    for slots in &mut expected.states {
        slots[0] = slots[2].clone();
    }
    expected.check(device, &cache, "after copy_slot 2 -> 0")?;

    device.copy_page(&mut cache, 1, 4)?;
    for pages in &mut expected.pages {
        pages[4] = pages[1].clone();
    }
    expected.check(device, &cache, "after copy_page 1 -> 4")?;

    device.clear_slot(&mut cache, 1)?;
    for (layer, slots) in expected.states.iter_mut().enumerate() {
        let found = device.read_state(&cache, layer, 1)?;
        // Ring and conv ring of a cleared slot mean nothing.
        slots[1] = GdnState { base: vec![0.0; spec.gdn.state_elements()], ..found };
    }
    expected.check(device, &cache, "after clear_slot 1")
}

pub(super) fn caches<D: Device, R: Device>(bench: &mut Bench<'_, D, R>) -> Result<(), Failure> {
    for spec in small_specs(&bench.options.geometries) {
        let describe = |failure: Failure| failure.within(&format!("{spec:?}"));
        check_one(bench.reference, &mut bench.random, &spec).map_err(describe)?;
        check_one(bench.device, &mut bench.random, &spec).map_err(describe)?;
        bench.runs += 1;
    }
    Ok(())
}

/// Caches of every geometry with every type of keys and values, and one of states with each.
pub(super) fn small_specs(geometries: &[Geometry]) -> Vec<CacheSpec> {
    let types = || KvType::ALL.into_iter().zip([StateType::F16, StateType::F32].into_iter().cycle());
    let of = |one| types().map(move |(kv_type, state_type)| small_spec(one, kv_type, state_type));
    geometries.iter().flat_map(of).collect()
}

fn small_spec(geometry: &Geometry, kv_type: KvType, state_type: StateType) -> CacheSpec {
    CacheSpec {
        kv_layers: 2,
        attention: geometry.attention,
        kv_type,
        pages: 5,
        gdn_layers: 2,
        gdn: geometry.gdn,
        state_type,
        slots: 3,
    }
}
