//! Random graphs of every operation: what kernels give in a planned arena is what the references give, for several sizes,
//! with all passes, without any, and with each left out.
#![cfg(feature = "cpu")]

mod compare;
mod edges;
mod known_bugs;
mod steps;

use compare::{Check, check};
use proptest::prelude::*;
use steps::Step;

fn cases() -> u32 {
    let scale = std::env::var("LZ_TEST_SCALE").unwrap_or_default();
    let more = std::env::var("LZ_TEST_CASES").ok().and_then(|count| count.parse().ok());
    more.unwrap_or(if scale == "full" { 100_000 } else { 1_500 })
}

fn random_steps() -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(any::<Step>(), 1..18)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: cases(), max_shrink_iters: 4_000, ..ProptestConfig::default() })]

    #[test]
    fn kernels_give_what_references_give(
        steps in random_steps(),
        results in prop::collection::vec(any::<u16>(), 1..4),
        left_out in any::<u16>(),
        sizes in (0i64..4, 0i64..7),
        wide in any::<bool>(),
        special in prop::bool::weighted(0.2),
    ) {
        let found = check(&Check { steps: &steps, results: &results, left_out, sizes: [sizes.0, sizes.1], wide, special });
        if let Err(wrong) = found {
            return Err(TestCaseError::fail(wrong));
        }
    }
}
