//! Properties of the memory plan, over random geometries, budgets and options.
#![allow(clippy::unwrap_used, reason = "a test may fail this way")]

use proptest::prelude::*;
use qwill_device::batch::{CHUNK_TOKENS, PAGE_TOKENS};
use qwill_device::plan::{HostMemory, MemoryPlan, PlanError, PlanInput, PlanOptions, PlanWeight, plan};
use qwill_device::{Geometry, KvType, StateType};

fn geometry() -> impl Strategy<Value = Geometry> {
    (0..Geometry::NAMES.len()).prop_map(|index| Geometry::named(Geometry::NAMES[index]).unwrap())
}

fn options() -> impl Strategy<Value = PlanOptions> {
    let counts = (
        prop::option::of(1usize..100),
        prop::option::of(1usize..40_000),
        prop::option::of(1usize..400_000),
        prop::sample::select(&KvType::ALL[..]),
        CHUNK_TOKENS..2048,
    );
    counts.prop_map(|(max_sequences, max_context_tokens, kv_tokens, kv_type, prefill_rows)| PlanOptions {
        max_sequences,
        max_context_tokens,
        kv_tokens,
        kv_type,
        state_type: if prefill_rows % 2 == 0 { StateType::F32 } else { StateType::F16 },
        prefill_rows,
        host_cache_bytes: if prefill_rows.is_multiple_of(3) { 0 } else { prefill_rows as u64 * 4_000_000 },
    })
}

fn weights() -> impl Strategy<Value = Vec<PlanWeight>> {
    let weight = (1u64..20_000_000_000).prop_map(|bytes| PlanWeight {
        group: format!("group {bytes}"),
        detail: String::new(),
        bytes,
    });
    prop::collection::vec(weight, 0..3)
}

fn make(
    geometry: &Geometry,
    weights: &[PlanWeight],
    budget_bytes: u64,
    options: PlanOptions,
) -> Result<MemoryPlan, PlanError> {
    let workspace = |rows: usize, logit_rows: usize| {
        vec![
            ("activations", rows as u64 * geometry.hidden as u64 * 50),
            ("logits", logit_rows as u64 * geometry.vocab as u64 * 4),
        ]
    };
    let is_shared = options.prefill_rows.is_multiple_of(2);
    let host = HostMemory { is_shared, staging_bytes: if is_shared { 0 } else { 78_000_000 } };
    plan(&PlanInput { geometry, weights, workspace: &workspace, budget_bytes, host, options })
}

proptest! {
    #[test]
    fn a_plan_fits_adds_up_and_keeps_what_was_fixed(
        geometry in geometry(), weights in weights(), budget in 0u64..60_000_000_000, options in options(),
    ) {
        match make(&geometry, &weights, budget, options) {
            Ok(plan) => {
                prop_assert!(plan.total_bytes() <= budget);
                prop_assert_eq!(plan.rows().iter().map(|row| row.bytes).sum::<u64>(), plan.total_bytes());
                prop_assert_eq!(plan.total_bytes() + plan.left_bytes(), budget);
                let weight_bytes: u64 = weights.iter().map(|weight| weight.bytes).sum();
                prop_assert!(plan.total_bytes() >= plan.cache_spec(&geometry).bytes() + weight_bytes);
                prop_assert!(plan.max_context_tokens <= plan.pages * PAGE_TOKENS, "one sequence fits");
                prop_assert!(plan.max_context_tokens >= 1 && plan.max_context_tokens <= geometry.max_context);
                prop_assert!(plan.slots >= 1 && plan.max_rows >= plan.slots && plan.max_rows >= plan.prefill_rows);
                prop_assert!(plan.max_logit_rows >= plan.slots.max(CHUNK_TOKENS));
                prop_assert!(options.max_sequences.is_none_or(|sequences| sequences == plan.slots));
                prop_assert!(options.max_context_tokens.is_none_or(|context| context == plan.max_context_tokens));
                prop_assert!(options.kv_tokens.is_none_or(|tokens| tokens.div_ceil(PAGE_TOKENS) == plan.pages));
                prop_assert_eq!(&plan, &make(&geometry, &weights, budget, options).unwrap(), "not deterministic");
            }
            Err(PlanError::DoesNotFit { needed_bytes, budget_bytes, .. }) => {
                prop_assert!(needed_bytes > budget_bytes && budget_bytes == budget);
                let enough = make(&geometry, &weights, needed_bytes, options).unwrap();
                prop_assert!(enough.total_bytes() <= needed_bytes);
            }
            Err(PlanError::Option(_)) => {
                let short = options.kv_tokens.unwrap_or(usize::MAX).min(geometry.max_context);
                prop_assert!(options.max_context_tokens.is_some_and(|context| context > short));
            }
        }
    }

    #[test]
    fn more_budget_never_gives_less(
        geometry in geometry(), weights in weights(), options in options(),
        budget in 0u64..60_000_000_000, more in 0u64..3_000_000_000,
    ) {
        if let Ok(small) = make(&geometry, &weights, budget, options) {
            let large = make(&geometry, &weights, budget + more, options).unwrap();
            prop_assert!(large.pages >= small.pages, "{} pages, then {}", small.pages, large.pages);
            prop_assert!(large.slots >= small.slots);
            prop_assert!(large.max_context_tokens >= small.max_context_tokens);
        }
    }
}
