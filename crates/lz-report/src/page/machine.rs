//! On what, with what and when.

use crate::figures::moment;
use crate::html::Html;
use crate::input::Input;

/// The line under the title.
pub(crate) fn line(html: &mut Html, input: &Input) {
    let names: Vec<&str> = input.machines.iter().map(|m| m.name.as_str()).filter(|name| !name.is_empty()).collect();
    html.el("p").at("class", "on-what");
    if !names.is_empty() {
        html.leaf("strong", "", names.join(", ")).text(" · ");
    }
    html.text(format!("made {} UTC", moment(input.generated_at))).end();
}

/// The section at the end.
pub(crate) fn write(html: &mut Html, input: &Input) {
    html.el("section").at("class", "card").leaf("h2", "", "Where the figures come from");
    for machine in &input.machines {
        html.leaf("h3", "", if machine.name.is_empty() { &machine.id } else { &machine.name });
        html.el("dl").at("class", "facts");
        let own = [("device", &machine.id), ("valid for", &machine.signature)];
        let facts = own.into_iter().chain(machine.versions.iter().map(|(name, version)| (name.as_str(), version)));
        for (name, value) in facts.filter(|(_, value)| !value.is_empty()) {
            html.el("div").leaf("dt", "", name).leaf("dd", "", value).end();
        }
        html.end();
    }
    html.el("ul").at("class", "notes");
    if let Some(source) = &input.source {
        html.leaf("li", "", format!("Measurements: {source}"));
    }
    for note in &input.notes {
        html.leaf("li", "", note);
    }
    let how = [
        "Times are medians; whiskers are the noise, below which two kernels count as equally fast.",
        "The baseline is what torch runs by itself. Chosen is what LayerZero runs.",
        "The floor is the least time the device can move the call's bytes and do its arithmetic in: by its peaks, or, \
where those are not known, by the best that was seen of it here.",
        "A kernel that gave a wrong result is never chosen, whatever its time.",
    ];
    for text in how {
        html.leaf("li", "", text);
    }
    html.end().end();
}
