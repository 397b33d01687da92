//! Which of two predicted times is ahead, where it is known what each takes the host and the device.

use lz_predict::Model;
use lz_select::{Compared, Estimate, EstimateKind, PerfSource, Rival, Side, Sides};
use proptest::prelude::*;

/// What a kernel takes the host and the device, each with what it may be off by beside others. Alone, its time may be off by a
/// fifth.
fn of_sides(host: (f64, f64), device: (f64, f64)) -> Estimate {
    let side = |(median_us, apart_us)| Side { median_us, apart_us: Some(apart_us) };
    let slower = if host.0 > device.0 { host } else { device };
    Estimate {
        median_us: slower.0,
        spread_us: 0.2 * slower.0,
        apart_us: Some(slower.1),
        sides: Some(Sides { host: side(host), device: side(device) }),
        samples: 20,
        kind: EstimateKind::Predicted,
        trusted: true,
    }
}

/// How a kernel compares with what plain torch runs.
fn with_torch(lib: &Estimate, torch: &Estimate) -> Compared {
    let (lib, torch) = (Rival { estimate: lib, baseline: false }, Rival { estimate: torch, baseline: true });
    Model::default().compare(&lib, &torch)
}

/// The host sets the pace of both and takes as long for both, in doubt; the device is done a seventh sooner, which shows whenever
/// the host is faster than it was.
#[test]
fn of_two_that_wait_for_the_host_the_one_that_takes_the_device_less_is_ahead() {
    let torch = of_sides((31.6, 4.2), (28.0, 2.1));
    let compared = |host, device| with_torch(&of_sides(host, device), &torch);
    assert_eq!(compared((32.6, 0.3), (24.0, 0.6)), Compared::Ahead);
    // Sooner by less than the noise, and by less than the noise and 3%.
    assert_eq!(compared((32.6, 0.3), (26.0, 0.6)), Compared::Tie);
    assert_eq!(compared((32.6, 0.3), (25.2, 0.6)), Compared::Tie);
    // The host takes longer for it, by a larger share than the device takes less.
    assert_eq!(compared((36.3, 3.0), (24.0, 0.6)), Compared::Tie);
}

/// The device sets the pace of both and is sooner done with neither for certain; the host takes a third less for the other, which
/// shows whenever it is slower than it was.
#[test]
fn of_two_that_wait_for_the_device_the_one_that_takes_the_host_less_is_ahead() {
    let torch = of_sides((24.4, 2.3), (26.9, 0.9));
    let compared = |host, device| with_torch(&of_sides(host, device), &torch);
    assert_eq!(compared((16.7, 0.2), (25.6, 0.3)), Compared::Ahead);
    assert_eq!(compared((16.7, 0.2), (27.2, 0.3)), Compared::Ahead);
    // The host takes less by the noise alone.
    assert_eq!(compared((23.0, 1.0), (26.2, 0.3)), Compared::Tie);
    // What is clear by the times is not a tie.
    assert_eq!(compared((16.7, 0.2), (29.0, 0.3)), Compared::Behind);
    assert_eq!(compared((16.7, 0.2), (22.0, 0.3)), Compared::Ahead);
}

/// Only the place of plain torch is at stake: among others the shorter time goes first anyway.
#[test]
fn ties_between_others_stay_ties() {
    let (a, b) = (of_sides((31.6, 4.2), (28.0, 2.1)), of_sides((32.6, 0.3), (24.0, 0.6)));
    let rival = |estimate| Rival { estimate, baseline: false };
    assert_eq!(Model::default().compare(&rival(&b), &rival(&a)), Compared::Tie);
}

fn sided() -> impl Strategy<Value = Estimate> {
    let side = || (0.1..100.0, 0.0..10.0);
    (side(), side()).prop_map(|(host, device)| of_sides(host, device))
}

proptest! {
    /// `compare(b, a)` is the mirror image of `compare(a, b)`.
    #[test]
    fn one_is_ahead_where_the_other_is_behind(a in sided(), b in sided()) {
        let (lib, torch) = (Rival { estimate: &a, baseline: false }, Rival { estimate: &b, baseline: true });
        let mirrored = match Model::default().compare(&torch, &lib) {
            Compared::Ahead => Compared::Behind,
            Compared::Behind => Compared::Ahead,
            Compared::Tie => Compared::Tie,
        };
        prop_assert_eq!(Model::default().compare(&lib, &torch), mirrored);
    }
}
