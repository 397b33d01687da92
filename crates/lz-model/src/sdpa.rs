//! torch's implementations of `scaled_dot_product_attention`, and which of them a caller allows.

use serde::{Deserialize, Serialize};

use crate::device::Platform;

/// An implementation torch's function chooses from (`torch.nn.attention.SDPBackend`), with torch's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum SdpaBackend {
    /// Written out in plain torch.
    Math = 0,
    /// FlashAttention.
    Flash,
    /// Memory-efficient attention.
    Efficient,
    /// cuDNN's.
    Cudnn,
    /// torch's name for what extensions bring.
    Overrideable,
}

impl SdpaBackend {
    /// All of them, in the order of their numbers.
    pub const ALL: [SdpaBackend; 5] =
        [SdpaBackend::Math, SdpaBackend::Flash, SdpaBackend::Efficient, SdpaBackend::Cudnn, SdpaBackend::Overrideable];

    /// Its name in `torch.nn.attention.SDPBackend`.
    pub const fn name(self) -> &'static str {
        match self {
            SdpaBackend::Math => "MATH",
            SdpaBackend::Flash => "FLASH_ATTENTION",
            SdpaBackend::Efficient => "EFFICIENT_ATTENTION",
            SdpaBackend::Cudnn => "CUDNN_ATTENTION",
            SdpaBackend::Overrideable => "OVERRIDEABLE",
        }
    }
}

/// What a kernel of torch's is, among the implementations of its attention function. A kernel that is none of them counts as
/// an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SdpaRole {
    /// torch's function itself, which chooses among those that are allowed. Only where `math` is allowed does it always find one.
    Function,
    /// Plain torch.
    Math,
    /// FlashAttention.
    Flash,
    /// Memory-efficient attention.
    Efficient,
    /// cuDNN's.
    Cudnn,
}

impl SdpaRole {
    /// What must be allowed for a kernel of this role on a platform; `None` is the role of an extension.
    pub fn needs(role: Option<SdpaRole>, platform: Platform) -> &'static [SdpaBackend] {
        match role {
            None => &[SdpaBackend::Overrideable],
            // Beyond CUDA and the CPU, devices bring their attention to torch as an extension.
            Some(SdpaRole::Function) if !matches!(platform, Platform::Cpu | Platform::Cuda) => {
                &[SdpaBackend::Math, SdpaBackend::Overrideable]
            }
            Some(SdpaRole::Function | SdpaRole::Math) => &[SdpaBackend::Math],
            Some(SdpaRole::Flash) => &[SdpaBackend::Flash],
            Some(SdpaRole::Efficient) => &[SdpaBackend::Efficient],
            Some(SdpaRole::Cudnn) => &[SdpaBackend::Cudnn],
        }
    }
}

/// What `torch.nn.attention.sdpa_kernel` allows where a call is made: implementations in torch's order of preference. All are
/// allowed by default.
///
/// Three bits per implementation, its number plus one, the first one lowest; 0 when all are allowed.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct SdpaChoice(u16);

impl SdpaChoice {
    /// Any implementation.
    pub const ANY: SdpaChoice = SdpaChoice(0);
    /// None at all: a digit that is no implementation's.
    const NONE: u16 = 7;

    /// Of those that are allowed (a bit each, by torch's numbers), in the order of `preference`. An extension is chosen by
    /// LayerZero's ranking, so that the order does not count where extensions are allowed.
    pub fn new(allowed: u8, preference: &[SdpaBackend]) -> SdpaChoice {
        let is_allowed = |backend: SdpaBackend| allowed >> backend as u8 & 1 == 1;
        if SdpaBackend::ALL.into_iter().all(is_allowed) {
            return SdpaChoice::ANY;
        }
        let counts = !is_allowed(SdpaBackend::Overrideable);
        let named = preference.iter().copied().filter(|_| counts);
        let mut order: Vec<SdpaBackend> = Vec::new();
        for backend in named.chain(SdpaBackend::ALL).filter(|b| is_allowed(*b)) {
            if !order.contains(&backend) {
                order.push(backend);
            }
        }
        let digits = order.iter().rev().fold(0, |code, &backend| code << 3 | (backend as u16 + 1));
        SdpaChoice(if order.is_empty() { SdpaChoice::NONE } else { digits })
    }

    /// As [`SdpaChoice::code`] gave it.
    pub(crate) fn from_code(code: u16) -> SdpaChoice {
        SdpaChoice(code)
    }

    /// The value that stands for it in a key.
    pub fn code(self) -> u16 {
        self.0
    }

    /// Whether any implementation is allowed.
    pub fn is_any(self) -> bool {
        self.0 == 0
    }

    /// What is allowed, the preferred one first.
    pub fn order(self) -> impl Iterator<Item = SdpaBackend> {
        (0..5).filter_map(move |at| match self.0 >> (3 * at) & 7 {
            digit @ 1..=5 => Some(SdpaBackend::ALL[usize::from(digit) - 1]),
            _ => None,
        })
    }

    /// Whether only torch's own implementations are allowed, so that torch's order of preference decides.
    pub fn is_for_torch_alone(self) -> bool {
        !self.is_any() && self.order().all(|backend| backend != SdpaBackend::Overrideable)
    }

    /// The place in the order of the first allowed one of `backends`; `None` when none of them is allowed. 0 where everything
    /// is.
    pub fn place(self, backends: &[SdpaBackend]) -> Option<usize> {
        if self.is_any() { Some(0) } else { self.order().position(|backend| backends.contains(&backend)) }
    }
}

impl std::fmt::Display for SdpaChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.order().map(SdpaBackend::name).collect();
        match (self.is_any(), names.is_empty()) {
            (true, _) => f.write_str("any"),
            (false, true) => f.write_str("nothing"),
            (false, false) => f.write_str(&names.join(", ")),
        }
    }
}

impl std::fmt::Debug for SdpaChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SdpaChoice({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use SdpaBackend::{Cudnn, Efficient, Flash, Math, Overrideable};

    fn bits(backends: &[SdpaBackend]) -> u8 {
        backends.iter().fold(0, |bits, &backend| bits | 1 << backend as u8)
    }

    #[test]
    fn a_choice_is_what_is_allowed_in_the_order_that_is_preferred() {
        let default = [Flash, Efficient, Math, Cudnn, Overrideable];
        let of = |allowed: &[SdpaBackend], preference: &[SdpaBackend]| SdpaChoice::new(bits(allowed), preference);
        assert!(of(&SdpaBackend::ALL, &[Math, Flash]).is_any());
        assert_eq!(of(&[Math, Flash], &default).to_string(), "FLASH_ATTENTION, MATH");
        assert_eq!(of(&[Math, Flash], &[Math, Flash]).to_string(), "MATH, FLASH_ATTENTION");
        assert_eq!(of(&[], &default).to_string(), "nothing");
        assert_eq!(SdpaChoice::ANY.to_string(), "any");
        // With extensions, the order is LayerZero's: one key.
        assert_eq!(of(&[Math, Overrideable], &default), of(&[Math, Overrideable], &[Overrideable, Math]));
        // A backend that the order leaves out comes last.
        assert_eq!(of(&[Math, Cudnn], &[Cudnn]).to_string(), "CUDNN_ATTENTION, MATH");
    }

    #[test]
    fn every_choice_survives_its_code_and_says_what_it_allows() {
        for allowed in 0..32u8 {
            let choice = SdpaChoice::new(allowed, &[Cudnn, Efficient, Math]);
            assert_eq!(SdpaChoice::from_code(choice.code()), choice);
            for backend in SdpaBackend::ALL {
                let is_allowed = allowed >> backend as u8 & 1 == 1;
                assert_eq!(choice.place(&[backend]).is_some(), is_allowed, "{allowed:05b} {backend:?}");
            }
            assert_eq!(choice.is_for_torch_alone(), allowed & bits(&[Overrideable]) == 0, "{allowed:05b}");
        }
    }

    #[test]
    fn torchs_function_is_sure_of_an_implementation_only_with_math() {
        let needs = |role, platform| SdpaRole::needs(role, platform);
        assert_eq!(needs(Some(SdpaRole::Function), Platform::Cuda), [Math]);
        assert_eq!(needs(Some(SdpaRole::Function), Platform::Mps), [Math, Overrideable]);
        assert_eq!(needs(None, Platform::Cuda), [Overrideable]);
    }
}
