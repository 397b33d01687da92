//! Everything about the language that can be tested without counting allocations.

mod cells;
mod errors;
mod language;
mod matching;
mod nesting;
mod possible;
mod random;
mod reference;
mod support;
