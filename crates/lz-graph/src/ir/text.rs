//! Graphs as text: one line for each value, in an order in which each follows what it reads.
//!
//! ```text
//! graph "mlp"
//! symbol s0 1..64
//! input %x: float32[s0, 3]
//! constant %w: float32[2, 3]
//! %p: float32[s0, 2] = matmul(%x, %w) {"transpose_b":true}  # model.fc
//! %y: float32[s0, 2] = unary(%p) {"kind":"relu"}
//! output %y
//! ```
//!
//! An input that is not given is `_`. A name of other characters than letters, digits, `_` and `.` is a JSON string
//! behind `%`, and
//! so is an origin that could be misread behind `#`. The printed form of what was read from a text is that text.

use std::fmt::Write as _;

use lz_abi::DType;
use smallvec::SmallVec;

use super::{Constant, Dim, Graph, GraphError, Meta, Source, Symbol, ValueId};
use crate::ops::{Op, UnknownOp};

/// Why a text is no graph.
#[derive(Debug, thiserror::Error)]
#[error("line {line}: {why}")]
pub struct TextError {
    /// Which line, counted from 1.
    pub line: usize,
    /// Why not.
    pub why: TextFault,
}

/// What is wrong with a line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextFault {
    /// Something else than it should be.
    #[error("{expected} is missing before '{found}'")]
    Syntax {
        /// What should stand there.
        expected: &'static str,
        /// What stands there.
        found: String,
    },
    /// A name that nothing before it has.
    #[error("'{0}' is read before anything makes it")]
    NoSuchValue(String),
    /// No constant of that name.
    #[error("there is no constant '{0}'")]
    NoSuchConstant(String),
    /// A constant or a result that is something else than is said.
    #[error("'{value}' is said to be {said}, and is {found}")]
    OtherMeta {
        /// The value.
        value: String,
        /// What is said.
        said: String,
        /// What it is.
        found: String,
    },
    /// No such operation, or attributes it does not have.
    #[error(transparent)]
    Op(#[from] UnknownOp),
    /// No size.
    #[error(transparent)]
    Dim(#[from] super::DimError),
    /// No element type.
    #[error(transparent)]
    DType(#[from] lz_abi::UnknownDType),
    /// The graph itself is wrong.
    #[error(transparent)]
    Graph(#[from] GraphError),
}

fn json(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_' || c == '.'
}

fn name(name: &str) -> String {
    if !name.is_empty() && name.chars().all(is_plain) { format!("%{name}") } else { format!("%{}", json(name)) }
}

fn origin(origin: &str) -> String {
    let plain = origin.trim() == origin && !origin.starts_with('"') && !origin.contains(char::is_control);
    if plain { origin.to_owned() } else { json(origin) }
}

impl Graph {
    /// The text form.
    pub fn text(&self) -> Result<String, GraphError> {
        let mut text = format!("graph {}\n", json(&self.name));
        let of = |id: ValueId| name(&self.value(id).name);
        let order = self.order()?;
        let mut line = |line: String| {
            text.push_str(&line);
            text.push('\n');
        };
        for symbol in &self.symbols {
            let max = symbol.max.map_or(String::new(), |max| max.to_string());
            line(format!("symbol {} {}..{max}", symbol.name, symbol.min));
        }
        for &id in &self.inputs {
            line(format!("input {}: {}", of(id), self.meta(id)));
        }
        // Those that are read, in the order they were made.
        let uses = self.uses();
        for id in self.values() {
            if uses[id.index()] > 0 && matches!(self.value(id).source, Source::Constant(_)) {
                line(format!("constant {}: {}", of(id), self.meta(id)));
            }
        }
        for id in order {
            let node = self.node(id);
            let inputs: Vec<String> = node.inputs.iter().map(|input| input.map_or("_".to_owned(), of)).collect();
            let mut row =
                format!("{}: {} = {}({})", of(node.output), self.meta(node.output), node.op.name(), inputs.join(", "));
            let attributes = node.op.attributes();
            if attributes.as_object().is_none_or(|attributes| !attributes.is_empty()) {
                let _ = write!(row, " {attributes}");
            }
            if !node.origin.is_empty() {
                let _ = write!(row, "  # {}", origin(&node.origin));
            }
            line(row);
        }
        for &id in &self.outputs {
            line(format!("output {}", of(id)));
        }
        for &(old, new) in &self.updates {
            line(format!("update {} = {}", of(old), of(new)));
        }
        Ok(text)
    }

    /// Reads a text. `constant` gives each constant by its name.
    pub fn from_text(text: &str, mut constant: impl FnMut(&str) -> Option<Constant>) -> Result<Graph, TextError> {
        let mut graph = Graph::default();
        for (at, line) in text.lines().enumerate() {
            let mut reader = Line { rest: line.trim() };
            if reader.rest.is_empty() {
                continue;
            }
            reader.read(&mut graph, &mut constant).map_err(|why| TextError { line: at + 1, why })?;
        }
        graph.verify().map_err(|why| TextError { line: text.lines().count(), why: why.into() })?;
        Ok(graph)
    }

    /// The graph in the DOT language of Graphviz: boxes for operations, ovals for inputs and constants.
    pub fn dot(&self) -> Result<String, GraphError> {
        let mut dot = format!("digraph {} {{\n  node [fontname=\"sans-serif\"];\n", json(&self.name));
        let uses = self.uses();
        for id in self.values() {
            let value = self.value(id);
            let (shape, kind) = match &value.source {
                Source::Input => ("oval", "input".to_owned()),
                Source::Constant(_) if uses[id.index()] > 0 => ("ellipse", "constant".to_owned()),
                Source::Node(node) => match self.get(*node) {
                    Some(node) => ("box", node.op.name().to_owned()),
                    None => continue,
                },
                Source::Constant(_) => continue,
            };
            let label = json(&format!("{kind}\n{}: {}", value.name, value.meta));
            let _ = writeln!(dot, "  v{} [shape={shape}, label={label}];", id.index());
        }
        for id in self.order()? {
            let node = self.node(id);
            for input in node.inputs.iter().flatten() {
                let _ = writeln!(dot, "  v{} -> v{};", input.index(), node.output.index());
            }
        }
        for (i, id) in self.outputs.iter().enumerate() {
            let _ = writeln!(dot, "  out{i} [shape=plaintext, label=\"output {i}\"];\n  v{} -> out{i};", id.index());
        }
        for (old, new) in &self.updates {
            let _ = writeln!(dot, "  v{} -> v{} [style=dashed, label=\"update\"];", new.index(), old.index());
        }
        dot.push_str("}\n");
        Ok(dot)
    }
}

/// What is left of a line.
struct Line<'a> {
    rest: &'a str,
}

impl<'a> Line<'a> {
    fn fault(&self, expected: &'static str) -> TextFault {
        TextFault::Syntax { expected, found: self.rest.chars().take(40).collect() }
    }

    fn take(&mut self, token: &'static str) -> bool {
        self.rest = self.rest.trim_start();
        match self.rest.strip_prefix(token) {
            Some(rest) => {
                self.rest = rest;
                true
            }
            None => false,
        }
    }

    fn need(&mut self, token: &'static str) -> Result<(), TextFault> {
        if self.take(token) { Ok(()) } else { Err(self.fault(token)) }
    }

    fn end(&mut self) -> Result<(), TextFault> {
        self.rest = self.rest.trim_start();
        if self.rest.is_empty() { Ok(()) } else { Err(self.fault("the end of the line")) }
    }

    fn word(&mut self) -> &'a str {
        self.rest = self.rest.trim_start();
        let end = self.rest.find(|c| !is_plain(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word
    }

    /// A JSON value at the start of what is left.
    fn json<T: serde::de::DeserializeOwned>(&mut self, expected: &'static str) -> Result<T, TextFault> {
        let mut values = serde_json::Deserializer::from_str(self.rest).into_iter::<T>();
        match values.next() {
            Some(Ok(value)) => {
                self.rest = &self.rest[values.byte_offset()..];
                Ok(value)
            }
            _ => Err(self.fault(expected)),
        }
    }

    fn name(&mut self) -> Result<String, TextFault> {
        self.need("%")?;
        if self.rest.starts_with('"') {
            return self.json("a name");
        }
        match self.word() {
            "" => Err(self.fault("a name")),
            word => Ok(word.to_owned()),
        }
    }

    fn value(&mut self, graph: &Graph) -> Result<ValueId, TextFault> {
        let name = self.name()?;
        graph.named(&name).ok_or(TextFault::NoSuchValue(name))
    }

    fn new_name(&mut self, graph: &Graph) -> Result<String, TextFault> {
        let name = self.name()?;
        match graph.named(&name) {
            Some(_) => Err(GraphError::SameName(name).into()),
            None => Ok(name),
        }
    }

    /// `float32[s0, 3]`.
    fn meta(&mut self) -> Result<Meta, TextFault> {
        self.need(":")?;
        let dtype: DType = self.word().parse()?;
        self.need("[")?;
        let end = self.rest.find(']').ok_or_else(|| self.fault("]"))?;
        let (sizes, rest) = self.rest.split_at(end);
        self.rest = &rest[1..];
        // A size may be `min(a, b)`: commas inside parentheses do not count.
        let (mut parts, mut depth, mut start) = (Vec::new(), 0, 0);
        for (i, c) in sizes.char_indices() {
            depth += i32::from(c == '(') - i32::from(c == ')');
            if c == ',' && depth == 0 {
                parts.push(&sizes[start..i]);
                start = i + 1;
            }
        }
        if !sizes.trim().is_empty() {
            parts.push(&sizes[start..]);
        }
        let shape: Vec<Dim> = parts.into_iter().map(|part| Dim::parse(part.trim())).collect::<Result<_, _>>()?;
        Ok(Meta::new(dtype, shape))
    }

    fn read(
        &mut self,
        graph: &mut Graph,
        constant: &mut impl FnMut(&str) -> Option<Constant>,
    ) -> Result<(), TextFault> {
        if self.rest.starts_with('%') {
            return self.node(graph);
        }
        match self.word() {
            "graph" => {
                self.rest = self.rest.trim_start();
                graph.name = self.json("a name")?;
            }
            "symbol" => {
                let name = self.word().to_owned();
                self.rest = self.rest.trim();
                let (min, max) = self.rest.split_once("..").ok_or_else(|| self.fault("min..max"))?;
                let number = |text: &str| text.trim().parse::<i64>().map_err(|_| self.fault("a number"));
                let max = if max.is_empty() { None } else { Some(number(max)?) };
                graph.symbols.push(Symbol { name, min: number(min)?, max });
                self.rest = "";
            }
            "input" => {
                let (name, meta) = (self.new_name(graph)?, self.meta()?);
                graph.input(&name, meta);
            }
            "constant" => {
                let (name, said) = (self.new_name(graph)?, self.meta()?);
                let found = constant(&name).ok_or_else(|| TextFault::NoSuchConstant(name.clone()))?;
                let id = graph.add_constant(found.renamed(&name));
                same(graph, id, &said)?;
            }
            "output" => {
                let value = self.value(graph)?;
                graph.outputs.push(value);
            }
            "update" => {
                let old = self.value(graph)?;
                self.need("=")?;
                let new = self.value(graph)?;
                graph.updates.push((old, new));
            }
            _ => return Err(self.fault("graph, symbol, input, constant, output, update or a value")),
        }
        self.end()
    }

    fn node(&mut self, graph: &mut Graph) -> Result<(), TextFault> {
        let (name, said) = (self.new_name(graph)?, self.meta()?);
        self.need("=")?;
        let op = self.word();
        self.need("(")?;
        let mut inputs: SmallVec<[Option<ValueId>; 4]> = SmallVec::new();
        while !self.take(")") {
            if !inputs.is_empty() {
                self.need(",")?;
            }
            inputs.push(if self.take("_") { None } else { Some(self.value(graph)?) });
        }
        self.rest = self.rest.trim_start();
        let attributes = if self.rest.starts_with('{') { self.json("attributes")? } else { serde_json::Value::Null };
        let op = Op::named(op, attributes)?;
        let mut origin = String::new();
        if self.take("#") {
            self.rest = self.rest.trim_start();
            origin = if self.rest.starts_with('"') { self.json("an origin")? } else { self.rest.to_owned() };
            self.rest = if self.rest == origin { "" } else { self.rest };
        }
        self.end()?;
        let id = graph.push(op, &inputs, &name, &origin)?;
        same(graph, id, &said)
    }
}

fn same(graph: &Graph, value: ValueId, said: &Meta) -> Result<(), TextFault> {
    let found = graph.value(value);
    if found.meta == *said {
        return Ok(());
    }
    Err(TextFault::OtherMeta { value: found.name.to_string(), said: said.to_string(), found: found.meta.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use lz_abi::Tensor;
    use proptest::prelude::*;

    const MLP: &str = r#"graph "mlp"
symbol s0 1..64
symbol s1 0..
input %x: float32[s0, 3]
input %cache: float32[s0, 2]
constant %w: float32[2, 3]
constant %"a b": float32[2]
%p: float32[s0, 2] = matmul(%x, %w) {"alpha":1.0,"transpose_a":false,"transpose_b":true}  # model.fc
%n: float32[s0, 2] = layer_norm(%p, _, %"a b") {"axes":1,"eps":0.5}
%y: float32[s0, 2] = unary(%n) {"kind":"relu"}  # "\"a\nb\""
output %y
output %p
update %cache = %p
"#;

    fn constants(name: &str) -> Option<Constant> {
        let shape: &[i64] = match name {
            "w" => &[2, 3],
            "a b" => &[2],
            _ => return None,
        };
        Some(Constant::owned("other", Tensor::zeros(DType::F32, shape)))
    }

    #[test]
    fn a_text_is_read_and_printed_as_it_was() {
        let graph = Graph::from_text(MLP, constants).unwrap();
        assert_eq!(graph.text().unwrap(), MLP);
        assert_eq!(graph.symbols[1], Symbol { name: "s1".into(), min: 0, max: None });
        assert_eq!(&*graph.nodes().last().unwrap().1.origin, "\"a\nb\"");
    }

    #[test]
    fn each_fault_is_told_with_its_line() {
        let fault = |text: &str| Graph::from_text(text, constants).unwrap_err();
        let message = |text: &str| fault(text).to_string();
        assert_eq!(
            message("hello"),
            "line 1: graph, symbol, input, constant, output, update or a value is missing before ''"
        );
        assert_eq!(message("\noutput %x"), "line 2: 'x' is read before anything makes it");
        assert_eq!(message("constant %v: float32[1]"), "line 1: there is no constant 'v'");
        assert_eq!(
            message("constant %w: float32[3, 2]"),
            "line 1: 'w' is said to be float32[3, 2], and is float32[2, 3]"
        );
        let x = "input %x: float32[2]\n";
        let line = |line: &str| fault(&format!("{x}{line}"));
        assert!(matches!(line("%y: float32[2] = nothing(%x)").why, TextFault::Op(_)));
        assert!(matches!(line("%y: float32[(] = unary(%x)").why, TextFault::Dim(_)));
        assert!(matches!(line("%y: real[2] = unary(%x)").why, TextFault::DType(_)));
        assert!(matches!(line("input %x: float32[2]").why, TextFault::Graph(GraphError::SameName(_))));
        assert!(matches!(line("%y: float32[3] = unary(%x) {\"kind\":\"relu\"}").why, TextFault::OtherMeta { .. }));
        assert!(matches!(line("%y: float32[2] = unary(%x) {\"kind\":\"relu\"} more").why, TextFault::Syntax { .. }));
    }

    #[test]
    fn dot_has_a_box_for_each_node_and_an_arrow_for_each_input() {
        let dot = Graph::from_text(MLP, constants).unwrap().dot().unwrap();
        assert_eq!(dot.matches("shape=box").count(), 3);
        assert_eq!(dot.matches(" -> ").count(), 2 + 2 + 1 + 2 + 1);
    }

    /// A name of any characters.
    fn names() -> impl Strategy<Value = String> {
        prop_oneof!["[a-z_.0-9]{1,6}", "[ -~é\n\"%#,]{1,6}"]
    }

    proptest! {
        #[test]
        fn every_graph_is_read_back(
            title in names(),
            given in proptest::collection::btree_set(names(), 6),
            origins in proptest::collection::vec(names(), 4),
            sizes in proptest::collection::vec("(s0|2|min\\(s0, 3\\)|s0\\*2 \\+ 1)", 0..4),
            picks in proptest::collection::vec((0usize..100, 0usize..100, 0u8..4), 4),
        ) {
            let given: Vec<String> = given.into_iter().collect();
            let mut graph = Graph::new(&title);
            graph.symbols.push(Symbol { name: "s0".into(), min: 1, max: Some(9) });
            let meta = Meta::new(DType::F32, sizes.iter().map(|size| Dim::parse(size).unwrap()));
            let mut values = vec![graph.input(&given[0], meta)];
            values.push(graph.add_constant(Constant::number(&given[1], DType::F32, 2.0)));
            for (i, &(a, b, kind)) in picks.iter().enumerate() {
                let (a, b) = (Some(values[a % values.len()]), Some(values[b % values.len()]));
                let (op, attributes, inputs) = match kind {
                    0 => ("unary", serde_json::json!({"kind": "tanh"}), vec![a]),
                    1 => ("binary", serde_json::json!({"kind": "add"}), vec![a, b]),
                    2 => ("full", serde_json::json!({"shape": ["s0"], "value": "-inf", "dtype": "float32"}), vec![]),
                    _ => ("cast", serde_json::json!({"dtype": "float32"}), vec![a]),
                };
                let op = Op::named(op, attributes).unwrap();
                // Sizes that cannot be broadcast make no node.
                if let Ok(value) = graph.push(op, &inputs, &given[2 + i], &origins[i]) {
                    values.push(value);
                }
            }
            graph.outputs = vec![*values.last().unwrap()];
            let text = graph.text().unwrap();
            let again = Graph::from_text(&text, |name| {
                Some(graph.constant(graph.named(name)?)?.clone())
            });
            let again = again.map_err(|why| TestCaseError::fail(format!("{why}\n{text}")))?;
            prop_assert_eq!(again.text().unwrap(), text);
            prop_assert_eq!(again.len(), graph.len());
        }

        #[test]
        fn no_text_makes_it_panic(
            text in "(graph|input|%x|%y|: |float32|\\[2\\]| = |unary|\\(|\\)|,|\\{|\\}|\"|#|\n|_| ){0,24}",
        ) {
            let _ = Graph::from_text(&text, |_| None);
        }
    }
}
