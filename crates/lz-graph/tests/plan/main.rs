//! Memory plans of random graphs and of models, checked by running them with names instead of numbers.

mod bad_graphs;
mod graphs;
mod models;
mod mutations;
mod properties;
mod regressions;
