//! The store, against models, and against everything that can happen to a file.

mod child;
mod damage;
mod disks;
mod errors;
mod faults;
mod killing;
mod maintenance;
mod merging;
mod model;
mod opening;
mod processes;
mod strangers;
mod support;
mod transfer;
