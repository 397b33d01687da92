//! The test binary as another process.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Duration;

use lz_perfdb::{Options, PerfDb, Record, State, StoreError};

use crate::support::{all, by_key, options, record};

/// What a child is to do, and with what.
const TASK: &str = "LZ_PERFDB_CHILD";

/// What a line of the task itself begins with.
const MARK: &str = "@@";

/// A child that does one of the tasks below: `task path numbers…`.
pub fn command(task: &str, path: &Path, numbers: &[u64]) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    set_task(&mut command, task, path, numbers);
    command
}

/// The arguments that make a command of this test binary do a task.
pub fn set_task(command: &mut Command, task: &str, path: &Path, numbers: &[u64]) {
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    let words = [task, path.to_str().unwrap(), &numbers.join(",")].join("\n");
    command.args(["child::the_task_of_a_child", "--exact", "--ignored", "--nocapture"]).env(TASK, words);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
}

/// A child that runs, and what it says.
pub struct Running {
    pub process: Child,
    said: BufReader<ChildStdout>,
}

impl Running {
    pub fn start(mut command: Command) -> Running {
        let mut process = command.spawn().unwrap();
        let said = BufReader::new(process.stdout.take().unwrap());
        Running { process, said }
    }

    /// The next of its own lines; the test harness prints others.
    pub fn line(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            match self.said.read_line(&mut line) {
                Ok(0) | Err(_) => return None,
                // A line that was cut off by the end of the process was not said.
                Ok(_) if !line.ends_with('\n') => return None,
                Ok(_) => {}
            }
            if let Some((_, own)) = line.trim_end().split_once(MARK) {
                return Some(own.to_owned());
            }
        }
    }

    /// The rest of its lines; it must end well.
    pub fn finish(mut self) -> Vec<String> {
        let lines = std::iter::from_fn(|| self.line()).collect();
        let mut error = String::new();
        let _ = std::io::Read::read_to_string(&mut self.process.stderr.take().unwrap(), &mut error);
        let status = self.process.wait().unwrap();
        assert!(status.success(), "{status}: {lines:?}\n{error}");
        lines
    }
}

fn say(text: impl std::fmt::Display) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{MARK}{text}").unwrap();
    out.flush().unwrap();
}

#[test]
#[ignore = "is run by other tests, as a process of its own"]
fn the_task_of_a_child() {
    let Ok(words) = std::env::var(TASK) else { return };
    let words: Vec<&str> = words.split('\n').collect();
    let [task, path, numbers] = words[..] else { panic!("{words:?}") };
    let numbers: Vec<u64> = numbers.split(',').filter_map(|number| number.parse().ok()).collect();
    let path = Path::new(path);
    match task {
        "write_forever" => write_forever(path, numbers[0]),
        "write_beside_others" => write_beside_others(path, numbers[0], numbers[1]),
        "read_what_cannot_be_written" => read_what_cannot_be_written(path),
        "write_until_too_large" => write_until_too_large(path),
        "write_in_spite_of_faults" => write_in_spite_of_faults(path, numbers[0]),
        other => panic!("unknown task {other}"),
    }
}

/// Rows of two per batch, said when they are on the disk.
fn write_forever(path: &Path, first: u64) {
    say("begin");
    let db = PerfDb::open(path, options());
    assert!(db.state().is_durable(), "{}", db.state());
    say("open");
    for number in (first..).step_by(2) {
        db.put(vec![record(number), record(number + 1)]).wait().unwrap();
        say(number);
    }
}

/// Rows of its own, and a row everybody writes.
fn write_beside_others(path: &Path, who: u64, rows: u64) {
    let db = PerfDb::open(path, options());
    assert!(db.state().is_durable(), "{}", db.state());
    for i in 0..rows {
        let mine = record(1_000_000 * (who + 1) + i);
        let contested = Record { measured_at: (i * 10 + who) as i64, ..record(7) };
        db.put(vec![mine, contested]).wait().unwrap();
    }
    say(db.state());
}

/// As a user who may only read.
fn read_what_cannot_be_written(path: &Path) {
    let db = PerfDb::open(path, options());
    assert!(matches!(db.state(), State::ReadOnly { .. }), "{}", db.state());
    assert_eq!(by_key(all(&db)), by_key((0..20).map(record)));
    let error = db.put(vec![record(100)]).wait().unwrap_err();
    assert!(matches!(error, StoreError::NotStored { .. }), "{error}");
    assert_eq!(all(&db).len(), 21, "what was not written is read in this process");
    assert!(matches!(db.merge(vec![record(101)]), Err(StoreError::Unwritable { .. })));
    // What does not count any more does not, for this process.
    let marked = db.invalidate(|r| (r.key == record(3).key).then(|| "test".into())).unwrap();
    assert_eq!((marked, all(&db).iter().filter(|r| !r.is_valid()).count()), (1, 1));
    assert_eq!(db.notes().len(), 1, "{:?}", db.notes());
    say(db.state());
}

/// Under a limit on the size of files.
fn write_until_too_large(path: &Path) {
    let db = PerfDb::open(path, options());
    say(db.state());
    let refused = (0..4000u64).find(|i| db.put(vec![record(*i)]).wait().is_err()).expect("the limit is met");
    assert!(matches!(db.state(), State::Memory { .. }), "{}", db.state());
    assert_eq!(by_key(all(&db)), by_key((0..=refused).map(record)), "every row is read");
    say(refused);
}

/// With system calls that fail. Whatever happens is said; nothing may panic, and no wrong row be read.
fn write_in_spite_of_faults(path: &Path, batches: u64) {
    let db = PerfDb::open(path, Options { busy_timeout: Duration::from_millis(50), ..options() });
    for number in 0..batches {
        if db.put(vec![record(number)]).wait().is_ok() {
            say(number);
        }
        // A row that was put is either read, or reading says that it cannot.
        if let Ok(rows) = db.records(&lz_perfdb::Filter::all()) {
            let rows = by_key(rows);
            assert!((0..=number).all(|i| rows.get(&record(i).key).is_none_or(|row| *row == record(i))), "{rows:?}");
        }
    }
    let _ = db.invalidate(|_| None);
    let _ = db.stats();
    let _ = db.flush();
}
