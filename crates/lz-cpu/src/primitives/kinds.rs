//! Kinds of operations as parameters: a number, or a name.

/// Makes an enum whose variants have names, and which parameters can hold.
macro_rules! kinds {
    ($(#[$doc:meta])* $kind:ident { $($(#[$about:meta])+ $variant:ident = $name:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $kind { $($(#[$about])+ $variant),+ }

        impl $kind {
            /// Every one, in the order of their numbers.
            pub const ALL: &'static [$kind] = &[$($kind::$variant),+];

            /// Its name.
            pub fn name(self) -> &'static str {
                match self { $($kind::$variant => $name),+ }
            }

            /// By its name.
            pub fn named(name: &str) -> Option<$kind> {
                match name { $($name => Some($kind::$variant),)+ _ => None }
            }

            /// As a parameter: its number.
            pub fn param(self) -> lz_abi::Param {
                lz_abi::Param::Int(self as i64)
            }

            /// Of a parameter: a number or a name.
            pub(crate) fn of(param: lz_abi::Param) -> Result<$kind, lz_abi::KernelError> {
                let found = match param {
                    lz_abi::Param::Int(number) => usize::try_from(number).ok().and_then(|n| $kind::ALL.get(n).copied()),
                    lz_abi::Param::Text(_) => param.as_str().and_then($kind::named),
                    _ => None,
                };
                found.ok_or_else(|| lz_abi::KernelError::Failed(format!("{param:?} is no {}", stringify!($kind))))
            }
        }
    };
}
pub(crate) use kinds;
