//! A page, parsed.

use roxmltree::{Document, Node, ParsingOptions};

/// The page without what only HTML can read: the content of its script.
pub fn readable(page: &str) -> String {
    assert_eq!(page.matches("<script").count(), 1, "one script, at the end");
    let (before, rest) = page.split_once("<script>").expect("a script");
    let (_, after) = rest.split_once("</script>").expect("its end");
    assert!(!after.contains("<script"));
    format!("{before}<script></script>{after}")
}

/// Parses what [`readable`] gave.
pub fn parse(text: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).unwrap_or_else(|e| panic!("not well-formed: {e}"))
}

/// The elements of this name under a node.
pub fn all<'a, 'i: 'a>(node: Node<'a, 'i>, name: &'a str) -> impl Iterator<Item = Node<'a, 'i>> + 'a {
    node.descendants().filter(move |n| n.has_tag_name(name))
}

/// Whether an element has a class.
pub fn has_class(node: Node<'_, '_>, class: &str) -> bool {
    node.attribute("class").is_some_and(|c| c.split_whitespace().any(|c| c == class))
}

/// The first element of this class.
pub fn by_class<'a, 'i>(node: Node<'a, 'i>, class: &str) -> Option<Node<'a, 'i>> {
    node.descendants().find(|n| has_class(*n, class))
}

/// The element of this id.
pub fn by_id<'a, 'i>(node: Node<'a, 'i>, id: &str) -> Option<Node<'a, 'i>> {
    node.descendants().find(|n| n.attribute("id") == Some(id))
}

/// All text in a node.
pub fn text(node: Node<'_, '_>) -> String {
    node.descendants().filter(|n| n.is_text()).filter_map(|n| n.text()).collect()
}

/// A number in percent: `12.5%`.
pub fn percent(text: &str) -> f64 {
    text.strip_suffix('%').and_then(|t| t.parse().ok()).unwrap_or_else(|| panic!("'{text}' is no percentage"))
}
