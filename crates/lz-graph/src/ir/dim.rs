//! Sizes: numbers, or polynomials of symbols.
//!
//! A size is kept as a sum of products with whole coefficients, in a fixed order, so that two sizes that are equal by the rules of
//! addition and multiplication have the same form: `2*(s0 + 1)` is `2*s0 + 2`. Quotients and remainders that do not come out
//! are atoms of such a sum.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::{Add, Mul, Sub};
use std::sync::Arc;

/// A size of a tensor, or a number that depends on sizes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim(Form);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Form {
    Known(i64),
    /// Never without a term that has a factor.
    Sum(Arc<BTreeMap<Vec<Atom>, i64>>),
}

/// A factor that cannot be taken apart.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Atom {
    Symbol(Arc<str>),
    Quotient(Dim, Dim),
    Remainder(Dim, Dim),
    Least(Dim, Dim),
    Greatest(Dim, Dim),
}

/// Why a size has no number, or a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DimError {
    /// A symbol without a number.
    #[error("the size '{0}' is not known")]
    Unknown(String),
    /// A number that does not fit into 64 bits.
    #[error("'{0}' is too large")]
    Overflow(String),
    /// A division by zero.
    #[error("'{0}' divides by zero")]
    Zero(String),
    /// A text that is no size.
    #[error("'{text}' is no size: {why}")]
    Syntax {
        /// The text.
        text: String,
        /// What is wrong with it.
        why: &'static str,
    },
}

/// A number for each symbol.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Symbols(BTreeMap<Arc<str>, i64>);

impl Symbols {
    /// No symbols.
    pub fn new() -> Symbols {
        Symbols::default()
    }

    /// Gives a symbol its number.
    pub fn set(&mut self, name: &str, number: i64) {
        self.0.insert(name.into(), number);
    }

    /// The number of a symbol.
    pub fn get(&self, name: &str) -> Option<i64> {
        self.0.get(name).copied()
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, i64)> {
        self.0.iter().map(|(name, number)| (&**name, *number))
    }
}

impl<'a> FromIterator<(&'a str, i64)> for Symbols {
    fn from_iter<I: IntoIterator<Item = (&'a str, i64)>>(pairs: I) -> Symbols {
        Symbols(pairs.into_iter().map(|(name, number)| (name.into(), number)).collect())
    }
}

impl Dim {
    /// A symbol.
    pub fn symbol(name: &str) -> Dim {
        Dim::atom(Atom::Symbol(name.into()))
    }

    fn atom(atom: Atom) -> Dim {
        Dim(Form::Sum(Arc::new(BTreeMap::from([(vec![atom], 1)]))))
    }

    fn of(mut terms: BTreeMap<Vec<Atom>, i64>) -> Dim {
        terms.retain(|_, n| *n != 0);
        match terms.len() {
            0 => Dim::from(0),
            1 if terms.contains_key(&Vec::new()) => Dim::from(terms[&Vec::new()]),
            _ => Dim(Form::Sum(Arc::new(terms))),
        }
    }

    fn terms(&self) -> BTreeMap<Vec<Atom>, i64> {
        match &self.0 {
            Form::Known(0) => BTreeMap::new(),
            Form::Known(n) => BTreeMap::from([(Vec::new(), *n)]),
            Form::Sum(terms) => (**terms).clone(),
        }
    }

    /// The number, if there are no symbols in it.
    pub fn known(&self) -> Option<i64> {
        if let Form::Known(n) = self.0 { Some(n) } else { None }
    }

    /// Whether it is this number.
    pub fn is(&self, number: i64) -> bool {
        self.known() == Some(number)
    }

    /// Whether it is 0 or more whatever sizes its symbols stand for: a sum of products of symbols without a minus.
    pub fn is_never_negative(&self) -> bool {
        match &self.0 {
            Form::Known(n) => *n >= 0,
            Form::Sum(terms) => terms
                .iter()
                .all(|(factors, n)| *n >= 0 && factors.iter().all(|factor| matches!(factor, Atom::Symbol(_)))),
        }
    }

    /// The number it has for these symbols.
    pub fn at(&self, symbols: &Symbols) -> Result<i64, DimError> {
        let Form::Sum(terms) = &self.0 else { return Ok(self.known().unwrap_or_default()) };
        let overflow = || DimError::Overflow(self.to_string());
        terms.iter().try_fold(0i64, |sum, (factors, &n)| {
            let product = factors
                .iter()
                .try_fold(n, |product, factor| product.checked_mul(factor.at(symbols)?).ok_or_else(overflow))?;
            sum.checked_add(product).ok_or_else(overflow)
        })
    }

    /// The whole quotient, rounded down.
    pub fn quotient(self, by: Dim) -> Dim {
        match (self.known(), by.known()) {
            (_, Some(1)) => self,
            (Some(a), Some(b)) if b != 0 => Dim::from(floor_div(a, b)),
            _ if self == by => Dim::from(1),
            _ => match self.divided(&by) {
                Some(exact) => exact,
                None => Dim::atom(Atom::Quotient(self, by)),
            },
        }
    }

    /// What the quotient leaves, with the sign of `by`.
    pub fn remainder(self, by: Dim) -> Dim {
        match (self.known(), by.known()) {
            (_, Some(1)) => Dim::from(0),
            (Some(a), Some(b)) if b != 0 => Dim::from(floor_mod(a, b)),
            _ if self == by || self.divided(&by).is_some() => Dim::from(0),
            _ => Dim::atom(Atom::Remainder(self, by)),
        }
    }

    /// The smaller one.
    pub fn least(self, other: Dim) -> Dim {
        match (self.known(), other.known()) {
            (Some(a), Some(b)) => Dim::from(a.min(b)),
            _ if self == other => self,
            _ => Dim::atom(if self < other { Atom::Least(self, other) } else { Atom::Least(other, self) }),
        }
    }

    /// The larger one.
    pub fn greatest(self, other: Dim) -> Dim {
        match (self.known(), other.known()) {
            (Some(a), Some(b)) => Dim::from(a.max(b)),
            _ if self == other => self,
            _ => Dim::atom(if self < other { Atom::Greatest(self, other) } else { Atom::Greatest(other, self) }),
        }
    }

    /// The quotient, if every term can be divided without a rest by the one term of `by`.
    fn divided(&self, by: &Dim) -> Option<Dim> {
        let by = by.terms();
        let (factors, &n) = by.iter().next().filter(|_| by.len() == 1)?;
        let mut found = BTreeMap::new();
        for (own, &m) in &self.terms() {
            let mut left = own.clone();
            for factor in factors {
                left.remove(left.iter().position(|one| one == factor)?);
            }
            if m % n != 0 {
                return None;
            }
            found.insert(left, m / n);
        }
        Some(Dim::of(found))
    }

    /// Every symbol in it.
    pub fn symbols(&self) -> Vec<String> {
        let mut found = Vec::new();
        self.collect(&mut found);
        found.sort();
        found.dedup();
        found
    }

    fn collect(&self, found: &mut Vec<String>) {
        let Form::Sum(terms) = &self.0 else { return };
        for atom in terms.keys().flatten() {
            match atom {
                Atom::Symbol(name) => found.push(name.to_string()),
                Atom::Quotient(a, b) | Atom::Remainder(a, b) | Atom::Least(a, b) | Atom::Greatest(a, b) => {
                    a.collect(found);
                    b.collect(found);
                }
            }
        }
    }

    /// Reads a size: whole numbers, symbols, `+ - * // %`, `min(a, b)`, `max(a, b)`, parentheses.
    pub fn parse(text: &str) -> Result<Dim, DimError> {
        let mut reader = Reader { text, at: 0 };
        let found = reader.sum(0)?;
        reader.space();
        if reader.at == text.len() { Ok(found) } else { Err(reader.error("something follows it")) }
    }
}

/// The quotient, rounded down.
fn floor_div(a: i64, b: i64) -> i64 {
    let quotient = a.wrapping_div(b);
    if a.wrapping_rem(b) != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient }
}

/// What the quotient rounded down leaves.
fn floor_mod(a: i64, b: i64) -> i64 {
    a.wrapping_sub(floor_div(a, b).wrapping_mul(b))
}

impl Atom {
    fn at(&self, symbols: &Symbols) -> Result<i64, DimError> {
        let both = |a: &Dim, b: &Dim| Ok::<_, DimError>((a.at(symbols)?, b.at(symbols)?));
        match self {
            Atom::Symbol(name) => symbols.get(name).ok_or_else(|| DimError::Unknown(name.to_string())),
            Atom::Quotient(a, b) => match both(a, b)? {
                (_, 0) => Err(DimError::Zero(self.to_string())),
                (a, b) => Ok(floor_div(a, b)),
            },
            Atom::Remainder(a, b) => match both(a, b)? {
                (_, 0) => Err(DimError::Zero(self.to_string())),
                (a, b) => Ok(floor_mod(a, b)),
            },
            Atom::Least(a, b) => both(a, b).map(|(a, b)| a.min(b)),
            Atom::Greatest(a, b) => both(a, b).map(|(a, b)| a.max(b)),
        }
    }
}

impl From<i64> for Dim {
    fn from(n: i64) -> Dim {
        Dim(Form::Known(n))
    }
}

impl Add for Dim {
    type Output = Dim;
    fn add(self, other: Dim) -> Dim {
        if let (Some(a), Some(b)) = (self.known(), other.known()) {
            return Dim::from(a.saturating_add(b));
        }
        let mut terms = self.terms();
        for (factors, n) in other.terms() {
            let sum = terms.entry(factors).or_insert(0);
            *sum = i64::saturating_add(*sum, n);
        }
        Dim::of(terms)
    }
}

impl Sub for Dim {
    type Output = Dim;
    fn sub(self, other: Dim) -> Dim {
        self + other * Dim::from(-1)
    }
}

impl Mul for Dim {
    type Output = Dim;
    fn mul(self, other: Dim) -> Dim {
        if let (Some(a), Some(b)) = (self.known(), other.known()) {
            return Dim::from(a.saturating_mul(b));
        }
        let mut terms = BTreeMap::new();
        for (a, n) in &self.terms() {
            for (b, m) in &other.terms() {
                let mut factors: Vec<Atom> = a.iter().chain(b).cloned().collect();
                factors.sort();
                let sum = terms.entry(factors).or_insert(0);
                *sum = i64::saturating_add(*sum, n.saturating_mul(*m));
            }
        }
        Dim::of(terms)
    }
}

impl fmt::Display for Atom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Atom::Symbol(name) => f.write_str(name),
            Atom::Quotient(a, b) => write!(f, "(({a}) // ({b}))"),
            Atom::Remainder(a, b) => write!(f, "(({a}) % ({b}))"),
            Atom::Least(a, b) => write!(f, "min({a}, {b})"),
            Atom::Greatest(a, b) => write!(f, "max({a}, {b})"),
        }
    }
}

impl fmt::Display for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Form::Sum(terms) = &self.0 else { return write!(f, "{}", self.known().unwrap_or_default()) };
        // Terms with symbols go first, and a number last.
        for (i, (factors, n)) in terms.iter().rev().enumerate() {
            let sign = match (i, *n < 0) {
                (0, false) => "",
                (0, true) => "-",
                (_, false) => " + ",
                (_, true) => " - ",
            };
            f.write_str(sign)?;
            let size = n.unsigned_abs();
            if size != 1 || factors.is_empty() {
                write!(f, "{size}{}", if factors.is_empty() { "" } else { "*" })?;
            }
            for (j, factor) in factors.iter().enumerate() {
                write!(f, "{}{factor}", if j == 0 { "" } else { "*" })?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Dim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl serde::Serialize for Dim {
    /// A number, or a text.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self.known() {
            Some(n) => serializer.serialize_i64(n),
            None => serializer.serialize_str(&self.to_string()),
        }
    }
}

impl<'de> serde::Deserialize<'de> for Dim {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Dim, D::Error> {
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Either {
            Number(i64),
            Text(String),
        }
        match Either::deserialize(deserializer)? {
            Either::Number(n) => Ok(Dim::from(n)),
            Either::Text(text) => Dim::parse(&text).map_err(serde::de::Error::custom),
        }
    }
}

/// Reads sizes from a text.
struct Reader<'a> {
    text: &'a str,
    at: usize,
}

/// Parentheses inside each other.
const DEPTH: usize = 64;

impl<'a> Reader<'a> {
    fn error(&self, why: &'static str) -> DimError {
        DimError::Syntax { text: self.text.chars().take(200).collect(), why }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn space(&mut self) {
        self.at = self.text.len() - self.rest().trim_start().len();
    }

    fn take(&mut self, token: &str) -> bool {
        self.space();
        let found = self.rest().starts_with(token);
        self.at += if found { token.len() } else { 0 };
        found
    }

    fn word(&mut self, of: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let word = &rest[..rest.find(|c| !of(c)).unwrap_or(rest.len())];
        self.at += word.len();
        word
    }

    fn sum(&mut self, depth: usize) -> Result<Dim, DimError> {
        if depth > DEPTH {
            return Err(self.error("it is too deep"));
        }
        let mut found = self.product(depth)?;
        loop {
            if self.take("+") {
                found = found + self.product(depth)?;
            } else if self.take("-") {
                found = found - self.product(depth)?;
            } else {
                return Ok(found);
            }
        }
    }

    fn product(&mut self, depth: usize) -> Result<Dim, DimError> {
        let mut found = self.factor(depth)?;
        loop {
            if self.take("//") {
                found = found.quotient(self.divisor(depth)?);
            } else if self.take("%") {
                found = found.remainder(self.divisor(depth)?);
            } else if self.take("*") {
                found = found * self.factor(depth)?;
            } else {
                return Ok(found);
            }
        }
    }

    fn divisor(&mut self, depth: usize) -> Result<Dim, DimError> {
        let found = self.factor(depth)?;
        if found.is(0) { Err(self.error("it divides by zero")) } else { Ok(found) }
    }

    fn factor(&mut self, depth: usize) -> Result<Dim, DimError> {
        if self.take("-") {
            return Ok(self.factor(depth + 1)? * Dim::from(-1));
        }
        if self.take("(") {
            let found = self.sum(depth + 1)?;
            return if self.take(")") { Ok(found) } else { Err(self.error("a parenthesis is not closed")) };
        }
        self.space();
        let digits = self.word(|c| c.is_ascii_digit());
        if !digits.is_empty() {
            return digits.parse::<i64>().map(Dim::from).map_err(|_| self.error("a number is too large"));
        }
        let name = self.word(|c| c.is_ascii_alphanumeric() || c == '_');
        match name {
            "" => Err(self.error("a number, a symbol or a parenthesis is missing")),
            "min" | "max" => {
                let closed = |reader: &mut Self, token| {
                    if reader.take(token) { Ok(()) } else { Err(reader.error("min and max have two arguments")) }
                };
                closed(self, "(")?;
                let a = self.sum(depth + 1)?;
                closed(self, ",")?;
                let b = self.sum(depth + 1)?;
                closed(self, ")")?;
                Ok(if name == "min" { a.least(b) } else { a.greatest(b) })
            }
            _ => Ok(Dim::symbol(name)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parsed(text: &str) -> Dim {
        Dim::parse(text).unwrap()
    }

    #[test]
    fn equal_sizes_have_one_form() {
        assert_eq!(parsed("2*(s0 + 1)"), parsed("2*s0 + 2"));
        assert_eq!(parsed("s0*s1 - s1*s0"), Dim::from(0));
        assert_eq!(parsed("(4*s0*s1) // (2*s1)"), parsed("2*s0"));
        assert_eq!(parsed("(4*s0) % 4"), Dim::from(0));
        assert_ne!(parsed("s0 // 2"), parsed("s0"));
        assert_eq!(parsed("2*s0 - 3").to_string(), "2*s0 - 3");
    }

    #[test]
    fn sums_without_a_minus_are_never_negative() {
        for text in ["0", "3", "s0", "2*s0*s1 + 1"] {
            assert!(parsed(text).is_never_negative(), "{text}");
        }
        for text in ["-1", "s0 - 1", "1 - s0", "s1 - s0", "s0 // 2", "min(s0, -1)"] {
            assert!(!parsed(text).is_never_negative(), "{text}");
        }
    }

    #[test]
    fn each_error_can_be_raised() {
        let symbols = Symbols::from_iter([("s0", i64::MAX), ("s1", 0)]);
        assert!(matches!(parsed("t").at(&symbols), Err(DimError::Unknown(_))));
        assert!(matches!(parsed("2*s0").at(&symbols), Err(DimError::Overflow(_))));
        assert!(matches!(parsed("s0 // s1").at(&symbols), Err(DimError::Zero(_))));
        for text in ["", "1 +", "(1", "1 2", "3 // 0", "min(1)", "99999999999999999999", "é", &"(".repeat(100)] {
            assert!(matches!(Dim::parse(text), Err(DimError::Syntax { .. })), "{text}");
        }
    }

    /// A tree, its text, and its number by plain arithmetic.
    fn trees() -> impl Strategy<Value = (String, i64)> {
        let leaf = prop_oneof![
            (-9i64..9).prop_map(|n| (format!("({n})"), n)),
            Just(("s0".to_owned(), 5)),
            Just(("s1".to_owned(), 12)),
        ];
        leaf.prop_recursive(4, 24, 2, |inner| {
            (inner.clone(), inner, 0usize..7).prop_filter_map("divides by zero", |((a, n), (b, m), kind)| {
                Some(match kind {
                    0 => (format!("({a} + {b})"), n + m),
                    1 => (format!("({a} - {b})"), n - m),
                    2 => (format!("({a} * {b})"), n * m),
                    3 if m != 0 => {
                        (format!("({a} // {b})"), n.div_euclid(m) - i64::from(m < 0 && n.rem_euclid(m) != 0))
                    }
                    4 if m != 0 => (format!("({a} % {b})"), n - floor_div(n, m) * m),
                    5 => (format!("min({a}, {b})"), n.min(m)),
                    6 => (format!("max({a}, {b})"), n.max(m)),
                    _ => return None,
                })
            })
        })
    }

    proptest! {
        #[test]
        fn the_number_is_the_one_of_arithmetic((text, number) in trees()) {
            let symbols = Symbols::from_iter([("s0", 5), ("s1", 12)]);
            // A divisor that is zero by its form is an error of the text.
            if let Ok(dim) = Dim::parse(&text) {
                prop_assert_eq!(dim.at(&symbols), Ok(number), "{}", text);
                // The printed form is the same size.
                prop_assert_eq!(Dim::parse(&dim.to_string()).unwrap().at(&symbols), Ok(number));
                prop_assert_eq!(Dim::parse(&dim.to_string()).unwrap(), dim);
            }
        }

        #[test]
        fn no_text_makes_it_panic(text in "[0-9s()+*/% ,minax-]{0,40}") {
            let _ = Dim::parse(&text);
        }
    }
}
