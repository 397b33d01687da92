//! How a graph runs.
//!
//! | | |
//! |---|---|
//! | [`interpreted`] | node by node with the references: slow, and right |
//! | [`binding`] | which kernels could run a node, and with which arguments |
//! | [`cached`] | attention over the part of a cache that is written |
//! | [`choosing`] | which of them does |
//! | [`options`], [`errors`] | how graphs are compiled, and what can go wrong |
//! | [`foreign`] | kernels of other libraries, which the caller hands in |
//! | `building` | from a plan to a program |
//! | [`compiled`] | a graph for exact sizes as a flat list of kernel calls over one arena |
//! | [`session`] | a graph for any sizes: compiled for each at its first use |
//! | [`profile`] | the time of each node |

#[cfg(feature = "cpu")]
pub mod binding;
#[cfg(feature = "cpu")]
mod building;
#[cfg(feature = "cpu")]
pub mod cached;
#[cfg(feature = "cpu")]
pub mod choosing;
#[cfg(feature = "cpu")]
pub mod compiled;
#[cfg(feature = "cpu")]
pub mod errors;
#[cfg(feature = "cpu")]
pub mod foreign;
pub mod interpreted;
#[cfg(feature = "cpu")]
pub mod kernel;
#[cfg(feature = "cpu")]
pub mod options;
#[cfg(feature = "cpu")]
pub mod profile;
#[cfg(feature = "cpu")]
pub mod session;

#[cfg(all(test, feature = "cpu"))]
mod tests;
