//! How the store stands, and what it has said about it.

use std::fmt;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use serde::Serialize;

/// How the store stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub enum State {
    /// Rows are read from the file and written to it.
    Open,
    /// Rows are read from the file; new ones stay in memory.
    ReadOnly {
        /// Why.
        why: String,
    },
    /// New rows stay in memory. Those of the file are still read where it can be.
    Memory {
        /// Why.
        why: String,
    },
    /// As [`State::Open`], with a new file: the one that was there was damaged.
    Rebuilt {
        /// Where the damaged file is now.
        set_aside: PathBuf,
        /// What was wrong with it.
        why: String,
        /// How many of its rows could be read and are in the new file.
        saved: usize,
    },
}

impl State {
    /// Whether what is put is written to the file.
    pub fn is_durable(&self) -> bool {
        matches!(self, State::Open | State::Rebuilt { .. })
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            State::Open => f.write_str("measurements are kept"),
            State::ReadOnly { why } => write!(f, "measurements are read, new ones are kept in memory only: {why}"),
            State::Memory { why } => write!(f, "new measurements are kept in memory only: {why}"),
            State::Rebuilt { set_aside, why, saved } => {
                let set_aside = set_aside.display();
                write!(f, "the measurements were damaged ({why}), set aside as '{set_aside}' and begun anew; ")?;
                write!(f, "{saved} rows could be saved")
            }
        }
    }
}

/// The state, and every sentence that was told.
pub(crate) struct Board {
    inner: Mutex<Inner>,
}

struct Inner {
    state: State,
    notes: Vec<String>,
}

/// Sentences that are remembered.
const MAX_NOTES: usize = 100;

impl Board {
    /// In a state that was found, which is told if it is not as it should be.
    pub fn new(state: State) -> Board {
        let board = Board::asked(State::Open);
        board.set(state);
        board
    }

    /// In a state that was asked for.
    pub fn asked(state: State) -> Board {
        Board { inner: Mutex::new(Inner { state, notes: Vec::new() }) }
    }

    pub fn state(&self) -> State {
        self.lock().state.clone()
    }

    pub fn notes(&self) -> Vec<String> {
        self.lock().notes.clone()
    }

    /// Changes the state, and tells of it if it is not as it should be.
    pub fn set(&self, state: State) {
        let sentence = (state != State::Open).then(|| state.to_string());
        let changed = std::mem::replace(&mut self.lock().state, state.clone()) != state;
        match sentence {
            Some(sentence) => self.tell(sentence),
            None if changed => tracing::info!("measurements are kept again"),
            None => {}
        }
    }

    /// Tells a sentence once.
    pub fn tell(&self, sentence: String) {
        let mut inner = self.lock();
        if inner.notes.contains(&sentence) || inner.notes.len() >= MAX_NOTES {
            return;
        }
        inner.notes.push(sentence.clone());
        drop(inner);
        tracing::warn!("{sentence}");
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
