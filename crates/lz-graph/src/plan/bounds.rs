//! How small an arena can be at best.

use super::offsets::Item;

/// The most bytes in use at one step. No arena for these items is smaller.
pub fn peak(items: &[Item]) -> usize {
    let steps = items.iter().map(|item| item.last + 1).max().unwrap_or(0);
    // By step: bytes that come into use, and bytes that went out of use before.
    let (mut comes, mut goes) = (vec![0usize; steps + 1], vec![0usize; steps + 1]);
    for item in items {
        comes[item.first] += item.bytes;
        goes[item.last + 1] += item.bytes;
    }
    let mut live = 0;
    let steps = comes.into_iter().zip(goes).map(|(comes, goes)| {
        live = live + comes - goes;
        live
    });
    steps.max().unwrap_or(0)
}
