//! Measurements as a page people look at.
//!
//! [`page`] makes one HTML file out of an [`Input`]: headline figures, every call's speed over the baseline, regret, a
//! table of calls, and for each operation who wins where and bars for every kernel. Figures are drawn here, as SVG;
//! the page loads nothing, is readable without its script, in light and dark, on wide and narrow screens.
//!
//! | | |
//! |---|---|
//! | [`Contest`], [`Candidate`] | a call, and the kernels that were measured on it |
//! | [`Regret`] | how far the choices are from the best |
//! | [`Machine`] | on what, with what |
//! | [`Input::document`] | the same as JSON, with the colours the page uses |
//!
//! ```
//! use lz_model::{CallSpec, DType};
//! use lz_report::{Candidate, Contest, Input, Machine, Regret, page};
//!
//! let call = CallSpec::new("rms_norm").tensor("x", DType::Bf16, &[512, 4096]);
//! let contest = Contest::new(call, "gpu-0", "eager")
//!     .candidate(Candidate::ok("torch.rms_norm", 20.0, 21.0, 0.2, 40).baseline(true))
//!     .candidate(Candidate::ok("fast.rms_norm", 10.0, 10.5, 0.1, 40))
//!     .candidate(Candidate::failed("other.rms_norm", "no kernel image for sm_90"))
//!     .floor(Some(6.0))
//!     .settled(None);
//! assert_eq!((contest.op.as_str(), contest.label.as_str()), ("norm.rms", "rows 512 · hidden 4096"));
//! assert_eq!((contest.chosen.as_deref(), contest.times_baseline), (Some("fast.rms_norm"), Some(2.0)));
//!
//! let contests = vec![contest];
//! let regret = Regret::from_contests(&contests);
//! let machine = Machine { id: "gpu-0".into(), name: "NVIDIA H200".into(), ..Machine::default() };
//! let input = Input { title: "Norms".into(), machines: vec![machine], contests, regret, ..Input::default() };
//! assert!(page(&input).contains("<h1>Norms</h1>"));
//! ```
#![forbid(unsafe_code)]

mod color;
mod contest;
mod figures;
mod html;
mod input;
mod map;
mod page;
mod regret;
mod scale;
mod shape;
mod summary;
mod view;

pub use color::Paint;
pub use contest::{Candidate, Contest, Outcome};
pub use input::{Cell, Document, Input, Machine, WinnerMap};
pub use page::page;
pub use regret::{Lost, Regret, RegretRow};
