//! "Did you mean": the closest known name to one that is not known.

/// The candidate closest to `wanted`, when one is close enough to be a likely typo.
pub fn nearest<'a>(wanted: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    candidates
        .into_iter()
        .map(|name| (strsim::jaro_winkler(wanted, name), name))
        .filter(|(similarity, _)| *similarity > 0.75)
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(a.1)))
        .map(|(_, name)| name)
}

/// The tail of an error message: `; did you mean 'x'?`, or nothing.
pub fn did_you_mean<S: AsRef<str>>(nearest: &Option<S>) -> String {
    nearest.as_ref().map_or_else(String::new, |name| format!("; did you mean '{}'?", name.as_ref()))
}
