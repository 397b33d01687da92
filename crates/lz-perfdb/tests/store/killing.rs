//! `kill -9` while rows are written: what was acknowledged is there.

use lz_perfdb::State;

use crate::child::{Running, command};
use crate::support::{Place, Random, all, by_key, record, scaled};

#[test]
fn every_acknowledged_row_survives_kill_9() {
    let place = Place::new();
    let mut random = Random::new(1);
    let mut acknowledged: Vec<u64> = Vec::new();
    let mut first = 0;
    for kill in 0..scaled(15, 1000) {
        let mut child = Running::start(command("write_forever", &place.path(), &[first]));
        // At any point: before the file is open, while it is made, after so many rows.
        let patience = random.below(6);
        let mut highest = first;
        for _ in 0..patience {
            match child.line().unwrap().parse() {
                Ok(number) => {
                    highest = number;
                    acknowledged.push(number);
                }
                Err(_) => continue,
            }
        }
        // A while that is not always the same part of a write.
        for i in 0..random.below(200_000) {
            std::hint::black_box(i);
        }
        child.process.kill().unwrap();
        child.process.wait().unwrap();
        // What it said before it died counts.
        while let Some(line) = child.line() {
            if let Ok(number) = line.parse() {
                highest = number;
                acknowledged.push(number);
            }
        }
        let db = place.open();
        assert_eq!(db.state(), State::Open, "kill {kill}: {:?}", db.notes());
        let rows = by_key(all(&db));
        for number in &acknowledged {
            for number in [*number, number + 1] {
                assert_eq!(rows.get(&record(number).key), Some(&record(number)), "row {number} after kill {kill}");
            }
        }
        // Rows that were not acknowledged may be there, both of a batch or none.
        for number in (0..highest + 20).step_by(2) {
            let there = [number, number + 1].map(|n| rows.contains_key(&record(n).key));
            assert_eq!(there[0], there[1], "the batch of {number} is torn after kill {kill}");
        }
        first = highest + 20;
    }
    assert!(acknowledged.len() >= scaled(10, 1000), "only {} rows were written", acknowledged.len());
    assert!(lz_perfdb::verify_file(&place.path()).unwrap().is_clean());
    assert!(place.files().iter().all(|name| !name.contains("corrupt")), "{:?}", place.files());
}
