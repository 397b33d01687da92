//! The notation of shapes in schemas, read once into axes.

use crate::layout::Layout;

/// One axis of a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Axis {
    /// Exactly the dimension.
    Dim(usize),
    /// The dimension, or 1 to broadcast.
    Broadcast(usize),
    /// The dimension plus one.
    PlusOne(usize),
    /// Any number of leading axes; their product is the dimension.
    Rest(usize),
    /// This size.
    Fixed(i64),
}

/// One alternative of a shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShapePattern {
    /// The layout this alternative is.
    pub layout: Option<Layout>,
    /// Its axes.
    pub axes: Vec<Axis>,
}

impl ShapePattern {
    /// Whether a tensor of `rank` can have this shape.
    pub fn fits_rank(&self, rank: usize) -> bool {
        match self.axes.first() {
            Some(Axis::Rest(_)) => rank + 1 >= self.axes.len(),
            _ => rank == self.axes.len(),
        }
    }
}

/// Reads the alternatives of a shape. `dim` finds a dimension's index by name.
///
/// Schemas are constants, and a test reads every one of them, so a malformed shape panics.
pub fn parse(text: &'static str, dim: impl Fn(&str) -> Option<usize>) -> Vec<ShapePattern> {
    let known = |name: &str| dim(name).unwrap_or_else(|| panic!("shape '{text}' names an unknown dimension '{name}'"));
    let axis = |token: &str| {
        if let Some(name) = token.strip_prefix("...") {
            Axis::Rest(known(name))
        } else if let Some(name) = token.strip_suffix('?') {
            Axis::Broadcast(known(name))
        } else if let Some(name) = token.strip_suffix("+1") {
            Axis::PlusOne(known(name))
        } else if let Ok(size) = token.parse() {
            Axis::Fixed(size)
        } else {
            Axis::Dim(known(token))
        }
    };
    text.split('|')
        .map(|alternative| {
            let (layout, axes) = match alternative.split_once(':') {
                Some((tag, axes)) => {
                    let layout = tag.trim().parse().unwrap_or_else(|e| panic!("shape '{text}': {e}"));
                    (Some(layout), axes)
                }
                None => (None, alternative),
            };
            ShapePattern { layout, axes: axes.split_whitespace().map(axis).collect() }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_axis_is_read() {
        let dims = ["a", "b"];
        let find = |name: &str| dims.iter().position(|d| *d == name);
        let patterns = parse("BSHD: a b? 2 b+1 | ...a b", find);
        assert_eq!(patterns[0].layout, Some(Layout::Bshd));
        assert_eq!(patterns[0].axes, [Axis::Dim(0), Axis::Broadcast(1), Axis::Fixed(2), Axis::PlusOne(1)]);
        assert_eq!(patterns[1].axes, [Axis::Rest(0), Axis::Dim(1)]);
        assert!(patterns[1].fits_rank(1) && patterns[1].fits_rank(5) && !patterns[0].fits_rank(3));
    }
}
