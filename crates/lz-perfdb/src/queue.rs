//! What waits for the writer: bounded, in order, nothing is ever dropped.

use std::collections::VecDeque;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::record::Record;

/// Rows that are written together, and who waits for that.
pub(crate) struct Job {
    pub rows: Vec<Record>,
    /// Whether the disk is tried even if it failed a moment ago.
    pub insist: bool,
    answer: Sender<Result<(), StoreError>>,
}

impl Job {
    pub fn new(rows: Vec<Record>, insist: bool) -> (Job, Ticket) {
        let (answer, given) = mpsc::channel();
        (Job { rows, insist, answer }, Ticket { given })
    }

    /// Says what became of it.
    pub fn answer(self, outcome: Result<(), StoreError>) {
        // Nobody may be waiting.
        let _ = self.answer.send(outcome);
    }
}

/// What became of rows that were put. It may be dropped: they are written all the same.
#[derive(Debug)]
pub struct Ticket {
    given: Receiver<Result<(), StoreError>>,
}

impl Ticket {
    /// Waits until the rows are on the disk, or says why they are not.
    pub fn wait(self) -> Result<(), StoreError> {
        self.given.recv().unwrap_or(Err(StoreError::Closed))
    }

    /// As [`Ticket::wait`], so long at most. Gives an answer once.
    pub fn wait_timeout(&self, patience: Duration) -> Option<Result<(), StoreError>> {
        match self.given.recv_timeout(patience) {
            Ok(outcome) => Some(outcome),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => Some(Err(StoreError::Closed)),
        }
    }

    /// A ticket that already says so.
    pub(crate) fn of(outcome: Result<(), StoreError>) -> Ticket {
        let (job, ticket) = Job::new(Vec::new(), false);
        job.answer(outcome);
        ticket
    }
}

/// The jobs that wait.
pub(crate) struct Queue {
    inner: Mutex<Waiting>,
    changed: Condvar,
    limit: usize,
}

struct Waiting {
    jobs: VecDeque<Job>,
    rows: usize,
    /// No more jobs are taken; those that wait are still done.
    closed: bool,
    /// The writer has ended.
    ended: bool,
}

impl Queue {
    /// For so many rows.
    pub fn new(limit: usize) -> Queue {
        let waiting = Waiting { jobs: VecDeque::new(), rows: 0, closed: false, ended: false };
        Queue { inner: Mutex::new(waiting), changed: Condvar::new(), limit }
    }

    /// Adds a job, waiting for room so long at most. A job larger than the queue goes in when it is alone.
    pub fn push(&self, job: Job, patience: Duration) -> Result<(), Box<(Job, StoreError)>> {
        let deadline = Instant::now() + patience;
        let mut waiting = self.lock();
        loop {
            if waiting.closed {
                return Err(Box::new((job, StoreError::Closed)));
            }
            if waiting.rows == 0 || waiting.rows + job.rows.len() <= self.limit {
                waiting.rows += job.rows.len();
                waiting.jobs.push_back(job);
                self.changed.notify_all();
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Box::new((job, StoreError::QueueFull { rows: waiting.rows, waited: patience })));
            }
            waiting = self.changed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// All jobs there are, waiting for one; `None` when the queue is closed and empty.
    pub fn take(&self) -> Option<Vec<Job>> {
        let mut waiting = self.lock();
        while waiting.jobs.is_empty() {
            if waiting.closed {
                return None;
            }
            waiting = self.changed.wait(waiting).unwrap_or_else(PoisonError::into_inner);
        }
        waiting.rows = 0;
        self.changed.notify_all();
        Some(waiting.jobs.drain(..).collect())
    }

    /// How many rows wait.
    pub fn rows(&self) -> usize {
        self.lock().rows
    }

    /// Takes no more jobs.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The writer has ended, by itself or by a panic: nothing that waits will be done.
    pub fn end(&self) {
        let mut waiting = self.lock();
        (waiting.closed, waiting.ended, waiting.rows) = (true, true, 0);
        // Their tickets learn that nobody will answer.
        waiting.jobs.clear();
        self.changed.notify_all();
    }

    /// Waits until the writer has ended, so long at most.
    pub fn wait_for_end(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        let mut waiting = self.lock();
        while !waiting.ended {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            waiting = self.changed.wait_timeout(waiting, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use super::*;
    use crate::{Key, Mode, Outcome};

    fn rows(count: usize) -> Vec<Record> {
        let key = Key::new("k", "op", "d", Mode::Eager, "");
        vec![Record::new(key, Outcome::Failed { error: String::new() }); count]
    }

    fn push(queue: &Queue, count: usize) -> Result<Ticket, StoreError> {
        let (job, ticket) = Job::new(rows(count), false);
        queue.push(job, Duration::ZERO).map(|()| ticket).map_err(|refused| {
            let (job, error) = *refused;
            assert_eq!(job.rows.len(), count, "what is not taken is given back");
            error
        })
    }

    #[test]
    fn it_is_bounded_by_rows_and_keeps_their_order() {
        let queue = Queue::new(10);
        for count in [4, 6] {
            push(&queue, count).unwrap();
        }
        assert!(matches!(push(&queue, 1), Err(StoreError::QueueFull { rows: 10, .. })));
        push(&queue, 0).unwrap();
        let taken: Vec<usize> = queue.take().unwrap().iter().map(|job| job.rows.len()).collect();
        assert_eq!(taken, [4, 6, 0]);
        push(&queue, 25).expect("alone, a large batch is taken");
        assert_eq!(queue.rows(), 25);
        assert!(push(&queue, 1).is_err());
    }

    #[test]
    fn whoever_waits_for_room_gets_it() {
        let queue = Arc::new(Queue::new(1));
        push(&queue, 1).unwrap();
        let waiting = thread::spawn({
            let queue = Arc::clone(&queue);
            move || queue.push(Job::new(rows(1), false).0, Duration::from_secs(60)).is_ok()
        });
        let taken = queue.take().unwrap().len() + queue.take().unwrap().len();
        assert!(waiting.join().unwrap() && taken == 2);
    }

    #[test]
    fn closed_it_is_emptied_and_ended_it_answers() {
        let queue = Queue::new(10);
        let first = push(&queue, 1).unwrap();
        queue.close();
        assert!(matches!(push(&queue, 1), Err(StoreError::Closed)));
        let jobs = queue.take().unwrap();
        assert!(queue.take().is_none());
        assert!(first.wait_timeout(Duration::ZERO).is_none());
        jobs.into_iter().for_each(|job| job.answer(Ok(())));
        first.wait().unwrap();

        let queue = Queue::new(10);
        let lost = push(&queue, 1).unwrap();
        assert!(!queue.wait_for_end(Duration::ZERO));
        queue.end();
        assert!(queue.wait_for_end(Duration::ZERO));
        assert!(matches!(lost.wait_timeout(Duration::ZERO), Some(Err(StoreError::Closed))));
        assert!(matches!(lost.wait(), Err(StoreError::Closed)));
    }
}
