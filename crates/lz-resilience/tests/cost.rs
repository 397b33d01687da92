//! What the checks on every call's path cost: far from their limits even where builds are slow and machines busy.

use lz_resilience::bench;

#[test]
fn the_closed_path_and_the_counters_are_cheap() {
    let (breaker, counter) = (bench::closed_path(), bench::record_call());
    println!("closed breaker {breaker:.2} ns, counter {counter:.2} ns");
    // The figures to reach are 10 and 5, in a release build on a quiet machine.
    assert!(breaker > 0.0 && breaker < 100.0, "{breaker} ns");
    assert!(counter > 0.0 && counter < 100.0, "{counter} ns");
}
