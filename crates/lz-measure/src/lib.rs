//! How kernels are timed, and what the numbers mean. Somebody else runs them: nothing here has a clock, and everything is
//! a function of what it was told.
//!
//! | | |
//! |---|---|
//! | [`Contest`] | the candidates of one call, timed side by side in rounds until it is known who is fastest |
//! | [`Timing`], [`order`], [`loss_of`] | what came of it: ranking with ties, and what is lost by stopping |
//! | [`Schedule`] | many contests under one budget |
//! | [`workload`] | which calls to measure: a grid of sizes, shapes |
//!
//! Machines are shared and noisy: times move by a factor of two between seconds, but for all candidates alike. So a round
//! times every candidate once, in an order that changes, and what counts are times relative to the level of their round.
//! What remains is the noise of each sample; differences below it are ties, which go to a fixed order, so that two runs
//! agree.
//!
//! ```
//! use lz_measure::{Budget, Contest, Item, Next, Visit, Rules, Sample, Schedule, order};
//!
//! // Two calls, two kernels each. The clock of this example shows what the kernels took.
//! let true_us = [[20.0, 30.0], [900.0, 400.0]];
//! let item = |id, size: f64| Item { id, group: "attention".into(), weight: 1.0, features: vec![size.log2()], cost_hint_us: 1e4 };
//! let mut schedule = Schedule::new(Budget::of_us(1e6), vec![item(0, 128.0), item(1, 4096.0)])?;
//! let mut contests = Vec::new();
//! for _ in 0..2 {
//!     let mut contest = Contest::new(Rules::default())?;
//!     contest.add("torch", true)?;
//!     contest.add("flash", false)?;
//!     contests.push(contest);
//! }
//!
//! let mut clock_us = 0.0;
//! while let Some(slice) = schedule.next(clock_us) {
//!     let (contest, began) = (&mut contests[slice.id], clock_us);
//!     let until = contest.rounds() + slice.rounds;
//!     while contest.rounds() < until {
//!         let Next::Time { candidate, calls } = contest.next() else { break };
//!         let per_call_us = true_us[slice.id][candidate];
//!         clock_us += per_call_us * f64::from(calls);
//!         contest.record(candidate, Sample { per_call_us, calls })?;
//!     }
//!     let finished = !matches!(contest.next(), Next::Time { .. });
//!     schedule.done(slice.id, Visit { loss: contest.loss(), took_us: clock_us - began, once_us: 0.0, finished })?;
//! }
//! let winner = |id: usize| order(&contests[id].results(), |timing| timing.candidate.clone())[0];
//! assert_eq!([winner(0), winner(1)], [0, 1]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]

mod contest;
mod schedule;
pub mod workload;

pub use contest::{Contest, ContestError, Next, Rules, Sample, Stats, Timing, loss_of, order};
pub use schedule::{Budget, Item, Progress, Schedule, ScheduleError, Slice, Visit};
