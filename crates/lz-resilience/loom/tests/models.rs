//! Models of the breaker and the counter, explored by loom. Run with `make loom`.
#![cfg(loom)]

use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use lz_resilience_loom::gate::{Entry, Gate, Limits, Moved, Ticket};
use lz_resilience_loom::lanes::{Count, Held, LANES};

/// A probe that never returns is given up after this long.
const PATIENCE: u64 = 50;

fn model(f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(f);
}

fn gate(failures: u32, successes: u32, probes: u32) -> Arc<Gate> {
    let limits = Limits {
        failures,
        successes,
        probes,
        timeout_ms: 100,
        max_timeout_ms: 1000,
        probe_timeout_ms: PATIENCE,
        seed: 0,
    };
    Arc::new(Gate::new(limits))
}

/// One that opened at 0, and the time at which it lets probes in.
fn open(successes: u32, probes: u32) -> (Arc<Gate>, u64) {
    let gate = gate(1, successes, probes);
    let Some(Moved::Opened { openings: 1, until }) = gate.failed(0) else { panic!() };
    (gate, until)
}

fn probe(gate: &Gate, now_ms: u64) -> Option<Ticket> {
    match gate.admit(now_ms) {
        Entry::Probe { ticket, .. } => Some(ticket),
        _ => None,
    }
}

/// Whatever a probe's outcome, no other goes while it is under way; clocks differ by a little.
#[test]
fn never_two_probes_at_once() {
    model(|| {
        let (gate, until) = open(3, 1);
        let under_way = Arc::new(AtomicU64::new(0));
        let halvings = Arc::new(AtomicU64::new(0));
        let call = |outcome: u64, now: u64| {
            let (gate, under_way, halvings) = (gate.clone(), under_way.clone(), halvings.clone());
            move || {
                let Entry::Probe { ticket, first } = gate.admit(now) else { return };
                halvings.fetch_add(first.into(), Ordering::Relaxed);
                assert_eq!(under_way.fetch_add(1, Ordering::AcqRel), 0, "two probes at once");
                under_way.fetch_sub(1, Ordering::AcqRel);
                match outcome {
                    0 => gate.release(ticket),
                    1 => assert_eq!(gate.probe_succeeded(ticket), None),
                    _ => assert!(gate.probe_failed(ticket, now).is_some()),
                }
            }
        };
        let others = [thread::spawn(call(0, until + 1)), thread::spawn(call(1, until))];
        call(2, until + 2)();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(halvings.load(Ordering::Relaxed), 1, "one caller is told that it is half-open");
    });
}

/// Failures that come together open it, and one caller is told.
#[test]
fn no_opening_is_lost() {
    model(|| {
        let gate = gate(3, 3, 1);
        let fail = |gate: Arc<Gate>| move || u32::from(gate.failed(0).is_some());
        let others = [thread::spawn(fail(gate.clone())), thread::spawn(fail(gate.clone()))];
        let mine = fail(gate.clone())();
        let told: u32 = others.into_iter().map(|other| other.join().unwrap()).sum();
        assert_eq!(told + mine, 1);
        assert!(!gate.is_closed());
    });
}

/// A success forgives what went before it, never an opening.
#[test]
fn a_success_does_not_undo_an_opening() {
    model(|| {
        let gate = gate(2, 3, 1);
        let other = {
            let gate = gate.clone();
            thread::spawn(move || gate.succeeded())
        };
        let opened = gate.failed(0).or_else(|| gate.failed(0)).is_some();
        other.join().unwrap();
        assert_eq!(opened, !gate.is_closed());
    });
}

/// Successes that come together are all counted: the third closes it, and one caller is told.
#[test]
fn three_successes_close_it() {
    model(|| {
        let (gate, until) = open(3, 3);
        let tickets = [(); 3].map(|()| probe(&gate, until).unwrap());
        assert_eq!(probe(&gate, until), None);
        let succeed = |gate: Arc<Gate>, ticket: Ticket| move || u32::from(gate.probe_succeeded(ticket).is_some());
        let others =
            [thread::spawn(succeed(gate.clone(), tickets[0])), thread::spawn(succeed(gate.clone(), tickets[1]))];
        let mine = succeed(gate.clone(), tickets[2])();
        let told: u32 = others.into_iter().map(|other| other.join().unwrap()).sum();
        assert_eq!(told + mine, 1);
        assert!(gate.is_closed());
    });
}

/// However two probes end, the next finds a place, at the latest when the patience is over.
#[test]
fn half_open_is_never_stuck() {
    model(|| {
        let (gate, until) = open(2, 1);
        let call = |gate: Arc<Gate>, now: u64, returns: bool| {
            move || match gate.admit(now) {
                Entry::Probe { ticket, .. } if returns => gate.release(ticket),
                _ => {}
            }
        };
        let others =
            [thread::spawn(call(gate.clone(), until, true)), thread::spawn(call(gate.clone(), until + 1, false))];
        call(gate.clone(), until + 2, true)();
        others.into_iter().for_each(|other| other.join().unwrap());
        let first = probe(&gate, until + 2 + PATIENCE).expect("a place");
        assert_eq!(gate.probe_succeeded(first), None);
        let second = probe(&gate, until + 2 + PATIENCE).expect("a place");
        assert_eq!(gate.probe_succeeded(second), Some(Moved::Closed));
    });
}

/// The outcome of a probe that was given up does not count, and takes no other's place.
#[test]
fn a_probe_that_was_given_up_has_no_say() {
    model(|| {
        let (gate, until) = open(1, 1);
        let late = probe(&gate, until).unwrap();
        let other = {
            let gate = gate.clone();
            thread::spawn(move || gate.probe_failed(late, until + PATIENCE))
        };
        let next = probe(&gate, until + PATIENCE);
        let reopened = other.join().unwrap().is_some();
        assert_eq!(next.is_none(), reopened, "either the old probe counts or the new one");
        if let Some(next) = next {
            assert_eq!(probe(&gate, until + PATIENCE), None, "its place is still taken");
            assert_eq!(gate.probe_succeeded(next), Some(Moved::Closed));
        }
    });
}

/// What is disabled for good stays so, whoever closes or opens it at the same time.
#[test]
fn forever_is_forever() {
    model(|| {
        let (gate, until) = open(1, 1);
        let ticket = probe(&gate, until).unwrap();
        let others = [
            {
                let gate = gate.clone();
                thread::spawn(move || u32::from(gate.trip()))
            },
            {
                let gate = gate.clone();
                thread::spawn(move || {
                    gate.probe_succeeded(ticket);
                    gate.failed(until);
                    u32::from(gate.trip())
                })
            },
        ];
        let told: u32 = others.into_iter().map(|other| other.join().unwrap()).sum();
        assert_eq!(told, 1);
        assert_eq!(gate.admit(u64::MAX), Entry::Refused(None));
    });
}

/// Lanes change hands between threads, and some find none free: every call is counted.
#[test]
fn no_count_is_lost_when_lanes_change_hands() {
    model(|| {
        let shared = Arc::new((Held::new(), Count::new()));
        let work = |shared: Arc<(Held, Count)>| {
            move || {
                let (held, count) = &*shared;
                let lane = held.take();
                count.add(&lane);
                held.give_back(lane);
            }
        };
        // One lane is held all the while, so that three threads want the other.
        let mine = shared.0.take();
        let others = [thread::spawn(work(shared.clone())), thread::spawn(work(shared.clone()))];
        shared.1.add(&mine);
        work(shared.clone())();
        others.into_iter().for_each(|other| other.join().unwrap());
        assert_eq!(LANES, 2);
        assert_eq!(shared.1.sum(), 4);
    });
}
