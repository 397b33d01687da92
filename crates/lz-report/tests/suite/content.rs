//! What a page shows is what was measured.

use std::collections::{BTreeMap, BTreeSet};

use lz_report::{Candidate, Contest, Input, Outcome, page};
use roxmltree::Node;

use crate::dom::{all, by_class, by_id, has_class, parse, percent, readable, text};
use crate::samples;

/// The least time among right results, found the plain way.
fn least(contest: &Contest) -> Option<(&str, f64)> {
    let mut best: Option<(&str, f64)> = None;
    for candidate in &contest.candidates {
        if let (Outcome::Ok, Some(us)) = (candidate.outcome, candidate.median_us)
            && best.is_none_or(|(_, least)| us < least)
        {
            best = Some((&candidate.kernel, us));
        }
    }
    best
}

/// `1.84×` and `12.3 µs` as numbers, the latter in microseconds.
fn number(text: &str) -> f64 {
    let text = text.trim().trim_end_matches('×');
    let (number, unit) = text.split_once(' ').unwrap_or((text, "µs"));
    let scale = match unit {
        "ns" => 1e-3,
        "µs" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        other => panic!("unit '{other}' in '{text}'"),
    };
    number.parse::<f64>().unwrap_or_else(|_| panic!("'{text}' is no number")) * scale
}

fn short(dtype: &str) -> &str {
    match dtype {
        "bfloat16" => "bf16",
        "float16" => "fp16",
        other => other,
    }
}

fn close(shown: f64, real: f64) -> bool {
    (shown / real - 1.0).abs() < 0.006
}

fn rows<'a, 'i>(root: Node<'a, 'i>) -> Vec<Node<'a, 'i>> {
    let body = all(by_id(root, "calls").unwrap(), "tbody").next().unwrap();
    body.children().filter(Node::is_element).collect()
}

#[test]
fn every_call_has_a_row_with_its_winner_time_and_ratios() {
    let input = samples::tuned();
    let html = readable(&page(&input));
    let document = parse(&html);
    let rows = rows(document.root());
    assert_eq!(rows.len(), input.contests.len());
    let mut seen = BTreeSet::new();
    for row in rows {
        let cells: Vec<Node<'_, '_>> = row.children().filter(Node::is_element).collect();
        let (op, label) = (text(cells[0]), text(all(cells[1], "a").next().unwrap()));
        let (dtype, chosen) = (text(cells[2]), text(by_class(cells[4], "id").unwrap()));
        let contest =
            input.contests.iter().find(|c| c.op == op && c.label == label && short(&c.dtype) == dtype).unwrap();
        assert!(seen.insert((op, label.clone(), dtype)));
        assert_eq!(Some(&chosen), contest.chosen.as_ref());
        let time =
            |kernel: &str| contest.candidates.iter().find(|c| c.kernel == kernel).and_then(|c| c.median_us).unwrap();
        let default =
            contest.candidates.iter().filter(|c| c.baseline).filter_map(|c| c.median_us).fold(f64::INFINITY, f64::min);
        assert!(close(number(&text(cells[5])), time(&chosen)), "{label}");
        assert!(close(number(&text(cells[6])), default / time(&chosen)), "{label}");
        assert!(close(number(&text(cells[7])), time(&chosen) / contest.floor_us.unwrap()), "{label}");
        let second = text(by_class(cells[8], "id").unwrap());
        let others = contest.candidates.iter().filter(|c| c.kernel != chosen).filter_map(|c| c.median_us);
        assert_eq!(time(&second), others.fold(f64::INFINITY, f64::min), "{label}");
        // Its link leads to its bars.
        let anchor = all(cells[1], "a").next().unwrap().attribute("href").unwrap();
        let bars = by_id(document.root(), &anchor[1..]).unwrap();
        assert_eq!(text(by_class(bars, "shape").unwrap()), label);
    }
}

#[test]
fn bars_are_as_long_as_times_and_the_floor_is_where_it_is() {
    let input = samples::tuned();
    let html = readable(&page(&input));
    let document = parse(&html);
    let (mut linear, mut with_floor) = (0, 0);
    for article in all(document.root(), "article") {
        let log = all(article, "td").any(|td| text(td) == "log scale");
        let bodies = all(article, "tr").filter(|tr| tr.attribute("title").is_some());
        let mut lengths = Vec::new();
        for row in bodies {
            let us = number(&text(all(row, "td").find(|td| td.attribute("class") == Some("n")).unwrap()));
            let length = percent(all(row, "rect").next().unwrap().attribute("width").unwrap());
            let floor = all(row, "line").find(|l| has_class(*l, "floor"));
            lengths.push((us, length, floor.map(|l| percent(l.attribute("x1").unwrap()))));
        }
        assert!(!lengths.is_empty());
        assert!(lengths.windows(2).all(|w| w[0].0 <= w[1].0 && w[0].1 <= w[1].1), "fastest first, and longer after");
        if log {
            assert!(lengths.last().unwrap().0 > 20.0 * lengths[0].0);
            continue;
        }
        linear += 1;
        for (us, length, floor) in &lengths {
            let unit = lengths[0].1 / lengths[0].0;
            assert!((length / (us * unit) - 1.0).abs() < 0.02, "{us} {length}");
            if let Some(floor) = floor {
                let told = text(by_class(article, "note").unwrap());
                let us = number(told.trim_start_matches("floor ").split(',').next().unwrap());
                assert!((floor - us * unit).abs() < 0.01 + 0.01 * us * unit, "{told}: {floor} for {}", us * unit);
                with_floor += 1;
            }
        }
    }
    assert!(linear > 10 && with_floor > 10);
}

#[test]
fn maps_show_every_call_once_with_its_winner() {
    let input = samples::tuned();
    let html = readable(&page(&input));
    let document = parse(&html);
    let marks = input.document().colors;
    let mut cells = 0;
    for map in document.descendants().filter(|n| has_class(*n, "map")) {
        let links: Vec<Node<'_, '_>> = all(map, "a").collect();
        let anchors: BTreeSet<&str> = links.iter().filter_map(|a| a.attribute("href")).collect();
        assert_eq!(anchors.len(), links.len());
        for link in links {
            let bars = by_id(document.root(), &link.attribute("href").unwrap()[1..]).unwrap();
            let chosen = text(by_class(by_class(bars, "is-chosen").unwrap(), "id").unwrap());
            assert_eq!(text(all(link, "b").next().unwrap()), marks[&chosen].mark);
            cells += 1;
        }
    }
    assert_eq!(cells, input.contests.len());
    // Prefill: sequence lengths across, dtype and batch down.
    let map = by_class(document.root(), "map").unwrap();
    let heads: Vec<String> = all(map, "th").map(text).collect();
    assert_eq!(heads[..6], ["seq", "128", "512", "2048", "8192", "bf16 · batch 1"]);
}

#[test]
fn headline_figures_are_those_of_the_contests() {
    let input = samples::tuned();
    let html = readable(&page(&input));
    let document = parse(&html);
    let tiles = by_class(document.root(), "tiles").unwrap();
    let figures: BTreeMap<String, String> = tiles
        .children()
        .map(|tile| (text(all(tile, "dt").next().unwrap()), text(by_class(tile, "figure").unwrap())))
        .collect();
    let ratios: Vec<f64> = input.contests.iter().filter_map(|c| c.times_baseline).collect();
    let product = ratios.iter().fold(1.0, |p, r| p * r.powf(1.0 / ratios.len() as f64));
    assert!(close(number(&figures["against the baseline"]), product), "{figures:?}");
    assert_eq!(figures["calls measured"], input.contests.len().to_string());
    let others = input.contests.iter().filter(|c| c.candidates.iter().any(|k| k.chosen && !k.baseline)).count();
    assert_eq!(figures["another kernel wins"], format!("{:.0} %", 100.0 * others as f64 / input.contests.len() as f64));
    let broken = input.contests.iter().flat_map(|c| &c.candidates).filter(|c| c.outcome != Outcome::Ok).count();
    assert_eq!(figures["not usable"], broken.to_string());
    assert!(close(number(&figures["regret"]), input.regret.as_ref().unwrap().geomean));
}

#[test]
fn the_histogram_counts_every_row() {
    let input = samples::tuned();
    let html = readable(&page(&input));
    let document = parse(&html);
    let histogram = by_class(document.root(), "histogram").unwrap();
    let counts = all(histogram, "text").filter(|t| has_class(*t, "strong")).map(|t| text(t).parse::<usize>().unwrap());
    assert_eq!(counts.sum::<usize>(), input.regret.unwrap().rows.len());
}

#[test]
fn broken_kernels_are_listed_with_their_error() {
    let input = samples::tuned();
    let html = readable(&page(&input));
    let document = parse(&html);
    let broken: Vec<String> = document.descendants().filter(|n| has_class(*n, "broken")).map(text).collect();
    let expected = input.contests.iter().flat_map(|c| &c.candidates).filter(|c| c.outcome != Outcome::Ok).count();
    assert_eq!(broken.len(), expected);
    assert!(broken.iter().any(|row| row.contains("wrong result: result differs from the reference")));
    // The line that says what happened, and all of it behind.
    let failed = broken.iter().find(|row| row.contains("failed")).unwrap();
    assert!(
        failed.contains("torch.OutOfMemoryError: CUDA out of memory") && failed.contains("line 81, in run"),
        "{failed}"
    );
}

#[test]
fn a_choice_that_is_not_the_fastest_is_marked() {
    let mut input = samples::tuned();
    let contest = input.contests[0].clone();
    let slow = least(&contest)
        .map(|(kernel, _)| contest.candidates.iter().find(|c| c.kernel != kernel).unwrap().kernel.clone());
    input.contests = vec![contest.settled(slow.as_deref())];
    let html = readable(&page(&input));
    let document = parse(&html);
    assert_eq!(text(by_class(document.root(), "over").unwrap()), "not the fastest");
}

#[test]
fn pages_at_the_edge_are_whole() {
    for (name, input) in samples::edges() {
        let html = readable(&page(&input));
        let document = parse(&html);
        assert_eq!(all(document.root(), "article").count(), input.contests.len(), "{name}");
        assert_eq!(by_class(document.root(), "empty").is_some(), input.contests.is_empty(), "{name}");
        let anchors: Vec<&str> = document.descendants().filter_map(|n| n.attribute("id")).collect();
        assert_eq!(anchors.iter().collect::<BTreeSet<_>>().len(), anchors.len(), "{name}: ids are unique");
        for link in all(document.root(), "a").filter_map(|a| a.attribute("href")) {
            assert!(link.starts_with('#') && anchors.contains(&&link[1..]), "{name}: {link}");
        }
    }
}

#[test]
fn a_page_asks_for_nothing() {
    let html = page(&samples::tuned());
    for word in ["http:", "https:", "src=", "@import", "url(http", "<link", "<iframe", "style=\""] {
        assert!(!html.contains(word), "{word}");
    }
    assert!(html.contains("default-src &#39;none&#39;"));
}

#[test]
fn the_same_input_gives_the_same_page_in_any_order() {
    let input = samples::tuned();
    let mut turned = input.clone();
    turned.contests.reverse();
    assert_eq!(page(&input), page(&turned));
}

#[test]
fn input_survives_json() {
    for (_, input) in samples::edges() {
        let text = serde_json::to_string(&input.document()).unwrap();
        let back: Input = serde_json::from_str(&text).unwrap();
        assert_eq!(back, input);
    }
    let candidate: Candidate = serde_json::from_str(r#"{"kernel":"k","outcome":"failed","error":"no"}"#).unwrap();
    assert_eq!(candidate, Candidate::failed("k", "no"));
}
