//! How a setting is declared: once, in [`settings`](crate::settings), and everything follows.

use std::path::PathBuf;

use crate::settings::Settings;
use crate::value::Value;

/// What a setting may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `true` or `false`.
    Bool,
    /// An integer of a range.
    Int {
        /// The least.
        min: i64,
        /// The largest.
        max: i64,
    },
    /// A number of a range, whole or not.
    Number {
        /// The least.
        min: i64,
        /// The largest.
        max: i64,
    },
    /// A name, or nothing.
    Name,
    /// A path.
    Path,
    /// A path, or nothing.
    File,
    /// One of a few words.
    Choice(&'static [&'static str]),
    /// A list of names.
    Names,
    /// One value, as long as no other is supported: it is in the specification, and whoever asks for more is told.
    Only {
        /// That value.
        value: Fixed,
        /// What the others would need.
        why: &'static str,
    },
}

/// The one value of a setting that has no other yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fixed {
    /// `false`.
    False,
    /// A word.
    Word(&'static str),
}

impl Fixed {
    /// As a value.
    pub fn value(self) -> Value {
        match self {
            Fixed::False => Value::Bool(false),
            Fixed::Word(word) => Value::from(word),
        }
    }

    /// As it is written.
    pub fn text(self) -> &'static str {
        match self {
            Fixed::False => "false",
            Fixed::Word(word) => word,
        }
    }
}

impl Kind {
    /// What to write, in words.
    pub fn expected(self) -> String {
        match self {
            Kind::Bool => "true or false".into(),
            Kind::Int { min, max: i64::MAX } => format!("an integer of at least {min}"),
            Kind::Int { min, max } => format!("an integer from {min} to {max}"),
            Kind::Number { min, max } => format!("a number from {min} to {max}"),
            Kind::Name => "a name".into(),
            Kind::Path | Kind::File => "a path".into(),
            Kind::Choice(words) => words.join(" or "),
            Kind::Names => "a list of names".into(),
            Kind::Only { value, .. } => value.text().into(),
        }
    }
}

/// How the environment says a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variable {
    /// By `LAYERZERO_` and the key in upper case, `.` as `_`.
    Derived,
    /// By this name.
    Named(&'static str),
    /// By this name, the other way round.
    Inverted(&'static str),
}

/// A setting.
pub struct Setting {
    /// Its key: `breaker.failure_threshold`.
    pub key: &'static str,
    /// What it is for.
    pub doc: &'static str,
    /// What it may be.
    pub kind: Kind,
    /// How the environment says it.
    pub variable: Variable,
    pub(crate) get: fn(&Settings) -> Value,
    pub(crate) set: fn(&mut Settings, &Value),
}

impl Setting {
    /// The environment variable that sets it.
    pub fn variable_name(&self) -> String {
        match self.variable {
            Variable::Named(name) | Variable::Inverted(name) => name.to_owned(),
            Variable::Derived => format!("LAYERZERO_{}", self.key.replace('.', "_").to_uppercase()),
        }
    }

    /// Its value when nobody says anything.
    pub fn default(&self) -> Value {
        (self.get)(&Settings::default())
    }
}

/// A type a setting can have.
pub(crate) trait Declared: Sized {
    const KIND: Kind;
    fn to_value(&self) -> Value;
    /// The value, which was checked against the kind before; nothing happens if it does not fit.
    fn receive(&mut self, value: &Value);
}

impl Declared for bool {
    const KIND: Kind = Kind::Bool;
    fn to_value(&self) -> Value {
        Value::Bool(*self)
    }
    fn receive(&mut self, value: &Value) {
        if let Value::Bool(value) = value {
            *self = *value;
        }
    }
}

macro_rules! declared_ints {
    ($($ty:ty: $max:expr;)+) => {$(
        impl Declared for $ty {
            const KIND: Kind = Kind::Int { min: 0, max: $max };
            fn to_value(&self) -> Value {
                Value::Int(i64::try_from(*self).unwrap_or(i64::MAX))
            }
            fn receive(&mut self, value: &Value) {
                if let Value::Int(value) = value {
                    *self = <$ty>::try_from(*value).unwrap_or(*self);
                }
            }
        }
    )+};
}

declared_ints! {
    u32: u32::MAX as i64;
    u64: i64::MAX;
}

impl Declared for f64 {
    const KIND: Kind = Kind::Number { min: 0, max: i64::MAX };
    fn to_value(&self) -> Value {
        Value::Float(*self)
    }
    fn receive(&mut self, value: &Value) {
        match value {
            Value::Float(value) => *self = *value,
            Value::Int(value) => *self = *value as f64,
            _ => {}
        }
    }
}

impl Declared for Option<String> {
    const KIND: Kind = Kind::Name;
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Null, |name| Value::Str(name.clone()))
    }
    fn receive(&mut self, value: &Value) {
        match value {
            Value::Str(name) => *self = Some(name.clone()),
            Value::Null => *self = None,
            _ => {}
        }
    }
}

impl Declared for PathBuf {
    const KIND: Kind = Kind::Path;
    fn to_value(&self) -> Value {
        Value::Str(self.display().to_string())
    }
    fn receive(&mut self, value: &Value) {
        if let Value::Str(path) = value {
            *self = path.into();
        }
    }
}

impl Declared for Option<PathBuf> {
    const KIND: Kind = Kind::File;
    fn to_value(&self) -> Value {
        self.as_ref().map_or(Value::Null, PathBuf::to_value)
    }
    fn receive(&mut self, value: &Value) {
        match value {
            Value::Str(path) => *self = Some(path.into()),
            Value::Null => *self = None,
            _ => {}
        }
    }
}

impl Declared for Vec<String> {
    const KIND: Kind = Kind::Names;
    fn to_value(&self) -> Value {
        Value::names(self.iter().cloned())
    }
    fn receive(&mut self, value: &Value) {
        if let Value::List(items) = value {
            let names = items.iter().filter_map(|item| match item {
                Value::Str(name) => Some(name.clone()),
                _ => None,
            });
            *self = names.collect();
        }
    }
}

/// Narrows the range of a kind of number.
pub(crate) const fn within(kind: Kind, limits: Option<(i64, i64)>) -> Kind {
    match (kind, limits) {
        (Kind::Int { .. }, Some((min, max))) => Kind::Int { min, max },
        (Kind::Number { .. }, Some((min, max))) => Kind::Number { min, max },
        (kind, _) => kind,
    }
}

/// Declares settings: the typed structs, their defaults, and the list [`SETTINGS`] come of it.
///
/// A line is `/// doc`, `name: type = default`, and where they apply `in (min, max)` and how the
/// environment says it. Those without a group stand under `settings`.
///
/// [`SETTINGS`]: crate::settings::SETTINGS
macro_rules! settings {
    (
        settings {
            $( $(#[doc = $doc:literal])+ $field:ident: $ty:ty = $default:expr
                $(, in $limits:tt)? $(, env $env:expr)?; )+
        }
        $( $(#[doc = $group_doc:literal])+ $group:ident: $Group:ident {
            $( $(#[doc = $sub_doc:literal])+ $sub:ident: $sub_ty:ty = $sub_default:expr
                $(, in $sub_limits:tt)? $(, env $sub_env:expr)?; )+
        } )+
    ) => {
        /// Every setting in force.
        #[derive(Clone, Debug, PartialEq)]
        pub struct Settings {
            $( $(#[doc = $doc])+ pub $field: $ty, )+
            $( $(#[doc = $group_doc])+ pub $group: $Group, )+
        }

        impl Default for Settings {
            fn default() -> Settings {
                Settings { $( $field: $default, )+ $( $group: $Group::default(), )+ }
            }
        }

        $(
            $(#[doc = $group_doc])+
            #[derive(Clone, Debug, PartialEq)]
            pub struct $Group {
                $( $(#[doc = $sub_doc])+ pub $sub: $sub_ty, )+
            }

            impl Default for $Group {
                fn default() -> $Group {
                    $Group { $( $sub: $sub_default, )+ }
                }
            }
        )+

        /// Every setting, in the order of the reference.
        pub static SETTINGS: &[Setting] = &[
            $( Setting {
                key: stringify!($field),
                doc: concat!($($doc, "\n"),+),
                kind: $crate::declare::within(<$ty as Declared>::KIND, settings!(@limits $($limits)?)),
                variable: settings!(@env $($env)?),
                get: |settings| settings.$field.to_value(),
                set: |settings, value| settings.$field.receive(value),
            }, )+
            $( $( Setting {
                key: concat!(stringify!($group), ".", stringify!($sub)),
                doc: concat!($($sub_doc, "\n"),+),
                kind: $crate::declare::within(<$sub_ty as Declared>::KIND, settings!(@limits $($sub_limits)?)),
                variable: settings!(@env $($sub_env)?),
                get: |settings| settings.$group.$sub.to_value(),
                set: |settings, value| settings.$group.$sub.receive(value),
            }, )+ )+
        ];

        /// The groups of settings, with what they are about.
        pub(crate) static GROUPS: &[(&str, &str)] =
            &[ $( (stringify!($group), concat!($($group_doc, "\n"),+)), )+ ];
    };
    (@limits) => { None };
    (@limits $limits:tt) => { Some($limits) };
    (@env) => { Variable::Derived };
    (@env $env:expr) => { $env };
}

pub(crate) use settings;
