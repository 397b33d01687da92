//! Values that are one word of a fixed list, in the table as in files.

/// Declares enums whose variants are written as one word each.
macro_rules! words {
    ($($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal),+ $(,)? })+) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
        pub enum $name { $($(#[$variant_doc])* #[serde(rename = $word)] $variant),+ }

        impl $name {
            /// Every value, in order.
            pub const ALL: &[$name] = &[$($name::$variant),+];

            /// The word it is written as.
            pub const fn as_str(self) -> &'static str {
                match self { $($name::$variant => $word),+ }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::words::UnknownWord;

            fn from_str(text: &str) -> Result<$name, $crate::words::UnknownWord> {
                let known = $name::ALL.iter().copied().find(|known| known.as_str() == text);
                known.ok_or_else(|| $crate::words::UnknownWord { found: text.to_owned(), expected: &[$($word),+] })
            }
        }
    )+};
}
pub(crate) use words;

/// A word that is not in the list.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{found}' is not one of {}", .expected.join(", "))]
pub struct UnknownWord {
    /// The word.
    pub found: String,
    /// Those that are.
    pub expected: &'static [&'static str],
}
