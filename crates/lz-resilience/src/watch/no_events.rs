//! No events here: looking must do.

use std::io;
use std::time::Duration;

use super::chain::Links;

/// What is not to be had.
#[derive(Debug)]
pub(super) enum Events {}

/// What is not to be had.
#[derive(Debug)]
pub(super) enum Waker {}

impl Waker {
    pub fn wake(&self) {
        match *self {}
    }
}

impl Events {
    pub fn new() -> Result<Events, io::Error> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub fn waker(&self) -> Waker {
        match *self {}
    }

    pub fn misses_nothing(&self) -> bool {
        match *self {}
    }

    pub fn follow(&mut self, _: &Links) {
        match *self {}
    }

    pub fn wait(&self, _: Duration) {
        match *self {}
    }
}
