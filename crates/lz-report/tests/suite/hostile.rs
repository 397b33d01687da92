//! Names, errors and numbers may be anything; a page stays a page.

use std::collections::BTreeMap;

use lz_model::{CallSpec, DType};
use lz_report::{Candidate, Contest, Input, Machine, Regret, RegretRow, page};
use proptest::prelude::*;

use crate::dom::{all, parse, readable, text};

/// Texts that would break out of a page that takes them as they are.
const NASTY: &[&str] = &[
    "<script>alert(1)</script>",
    "</script><script>alert(1)</script>",
    "</style><img src=x onerror=alert(1)>",
    "\"><svg onload=alert(1)>",
    "' onmouseover='alert(1)",
    "\" onfocus=\"alert(1)\" autofocus=\"",
    "]]><!--",
    "--><b>",
    "&lt;script&gt; &amp; &#x3c;",
    "javascript:alert(1)",
    "\0\u{1}\u{7f}\u{85}\u{202e}\u{fffe}\u{feff}",
    "line\r\nbreak\ttab",
    "</title></head><body>",
    "<!DOCTYPE x [<!ENTITY a \"b\">]>&a;",
    "🦀 ﷽ ｆｕｌｌ",
];

fn nasty() -> impl Strategy<Value = String> {
    let piece = prop_oneof![3 => prop::sample::select(NASTY).prop_map(str::to_owned), 1 => any::<String>(), 1 => "[<>&\"'/=a-z ]{0,12}"];
    prop::collection::vec(piece, 0..3).prop_map(|pieces| pieces.concat())
}

/// As long, as many lines, and harmless.
fn tame(text: &str) -> String {
    text.chars().map(|c| if c.is_alphanumeric() || c.is_whitespace() { c } else { 'x' }).collect()
}

fn any_time() -> impl Strategy<Value = Option<f64>> {
    prop_oneof![
        4 => (0.01..1e7f64).prop_map(Some),
        1 => prop::sample::select(vec![0.0, -1.0, f64::NAN, f64::INFINITY, f64::NEG_INFINITY, f64::MIN_POSITIVE, 5e-324, f64::MAX]).prop_map(Some),
        1 => any::<f64>().prop_map(Some),
        1 => Just(None),
    ]
}

/// Everything on a page, with these texts.
fn input(texts: &[String]) -> Input {
    let text = |i: usize| texts[i % texts.len()].clone();
    let call = |i: usize| {
        CallSpec::new(if i == 0 { "rms_norm".to_owned() } else { text(i) })
            .tensor("x", DType::F32, &[1 << i, 64])
            .param("eps", text(1).as_str())
    };
    let contests = (0..3).map(|i| {
        // Numbered, so that texts do not decide which are the same.
        let mut contest = Contest::new(call(i), text(2), text(3))
            .candidate(Candidate::ok(format!("{i}0{}", text(4)), 1.0, 2.0, 0.1, 3).baseline(true))
            .candidate(Candidate::ok(format!("{i}1{}", text(5)), 2.0, 2.0, 0.1, 3))
            .candidate(Candidate::wrong(format!("{i}2{}", text(6)), text(7)))
            .candidate(Candidate::failed(format!("{i}3{}", text(8)), text(9)));
        contest.op = format!("{i}{}", text(10));
        contest.label = format!("{i}{}", text(11));
        contest.dtype = text(0);
        contest.variant = format!("{i}{}", text(1));
        contest.settled(None)
    });
    let row = RegretRow {
        op: text(2),
        label: text(3),
        chosen: text(4),
        best: text(5),
        baseline: Some(text(6)),
        ratio_best: 1.5,
        ratio_baseline: None,
    };
    Input {
        title: format!("t{}", text(7)),
        machines: vec![Machine {
            id: format!("i{}", text(8)),
            name: format!("n{}", text(9)),
            signature: format!("s{}", text(10)),
            versions: BTreeMap::from([(format!("v{}", text(11)), format!("w{}", text(0)))]),
        }],
        contests: contests.collect(),
        regret: Some(Regret::of(text(1), vec![row])),
        notes: vec![text(2)],
        source: Some(text(3)),
        generated_at: 0,
    }
}

/// How often each element and attribute occurs.
fn structure(page: &str) -> BTreeMap<String, usize> {
    let html = readable(page);
    let mut counts = BTreeMap::new();
    for node in parse(&html).descendants().filter(|n| n.is_element()) {
        *counts.entry(node.tag_name().name().to_owned()).or_default() += 1;
        for attribute in node.attributes() {
            *counts.entry(format!("{}@{}", node.tag_name().name(), attribute.name())).or_default() += 1;
        }
    }
    counts
}

/// What the page makes of a text: the same, without what no document may contain.
fn shown(text: &str) -> String {
    let allowed = |c: char| match c {
        '\r' => '\n',
        '\n' | '\t' => c,
        c if c.is_control()
            || "\u{202a}\u{202b}\u{202c}\u{202d}\u{202e}\u{2066}\u{2067}\u{2068}\u{2069}\u{fffe}\u{ffff}"
                .contains(c) =>
        {
            '\u{fffd}'
        }
        c => c,
    };
    text.chars().map(allowed).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    /// Texts add no element and no attribute, and are read back as they were given.
    #[test]
    fn texts_stay_texts(texts in prop::collection::vec(nasty(), 12)) {
        let tamed: Vec<String> = texts.iter().map(|t| tame(t)).collect();
        let given = input(&texts);
        let html = page(&given);
        prop_assert_eq!(structure(&html), structure(&page(&input(&tamed))));
        let html = readable(&html);
        let document = parse(&html);
        let title = all(document.root(), "h1").next().map(text).unwrap();
        prop_assert_eq!(title, shown(&given.title));
        let kernels: Vec<String> = document.descendants().filter(|n| n.attribute("class") == Some("id")).map(text).collect();
        for candidate in given.contests.iter().flat_map(|c| &c.candidates) {
            prop_assert!(kernels.contains(&shown(&candidate.kernel)), "{:?}", candidate.kernel);
        }
        for node in document.descendants() {
            for attribute in node.attributes() {
                prop_assert!(!attribute.name().starts_with("on"));
                prop_assert!(attribute.name() != "href" || attribute.value().starts_with('#'));
            }
        }
    }

    /// Numbers that are none are left out: every coordinate is a number, in its range.
    #[test]
    fn numbers_stay_on_the_page(
        times in prop::collection::vec((any_time(), any_time(), any_time(), any_time(), any::<bool>()), 1..8),
        floor in any_time(),
        ratio in any_time(),
        generated_at in any::<i64>(),
        rows in prop::collection::vec((any_time(), any_time()), 0..4),
    ) {
        let call = CallSpec::new("rms_norm").tensor("x", DType::F32, &[4, 64]);
        let mut contest = Contest::new(call, "d", "eager").floor(floor);
        for (i, (median, p95, spread, warmup, baseline)) in times.into_iter().enumerate() {
            let mut candidate = Candidate::ok(format!("k{i}"), 1.0, 1.0, 1.0, 3).baseline(baseline).warmup(warmup);
            (candidate.median_us, candidate.p95_us, candidate.spread_us) = (median, p95, spread);
            contest = contest.candidate(candidate);
        }
        let mut contest = contest.settled(None);
        let settled = contest.clone();
        contest.times_baseline = ratio;
        let rows = rows.into_iter().map(|(best, default)| RegretRow { ratio_best: best.unwrap_or(1.0), ratio_baseline: default, ..RegretRow::default() });
        let regret = Some(Regret::of("", rows.collect()));
        let given = Input { contests: vec![contest, settled], regret, generated_at, ..Input::default() };
        let html = readable(&page(&given));
        let document = parse(&html);
        for node in document.descendants().filter(|n| n.is_element()) {
            for name in ["x", "x1", "x2", "cx", "y", "y1", "y2", "cy", "width", "height"] {
                let Some(value) = node.attribute(name) else { continue };
                let (number, most) = value.strip_suffix('%').map_or((value, 400.0), |n| (n, 100.0));
                let number: f64 = number.parse().unwrap();
                prop_assert!((0.0..=most).contains(&number), "{name}={value} of {}", node.tag_name().name());
            }
        }
    }
}
