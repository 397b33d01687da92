//! With what a time was measured, and under which conditions.

use crate::words::words;

/// The software and the device behind a measurement; `None` is not known. An empty text counts as not known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Provenance {
    /// The kernel's own version.
    pub kernel_version: Option<String>,
    /// The version of the library it is part of.
    pub backend_version: Option<String>,
    /// The version of LayerZero that measured.
    pub layerzero_version: Option<String>,
    /// The hash of the backend's capabilities document.
    pub capabilities_hash: Option<String>,
    /// The version of torch.
    pub torch_version: Option<String>,
    /// The version of the CUDA toolkit.
    pub cuda_version: Option<String>,
    /// The version of the device's driver.
    pub driver_version: Option<String>,
    /// The device's UUID.
    pub device_uuid: Option<String>,
}

/// What of a provenance a time depends on, each with its name. LayerZero's own version is not among them: it chooses
/// kernels and does not run in them. Nor is the device, which is part of the key.
type Fact = fn(&Provenance) -> &Option<String>;
const FACTS: &[(&str, Fact)] = &[
    ("the driver", |p| &p.driver_version),
    ("the CUDA toolkit", |p| &p.cuda_version),
    ("torch", |p| &p.torch_version),
    ("the library", |p| &p.backend_version),
    ("the kernel", |p| &p.kernel_version),
    ("the capabilities document", |p| &p.capabilities_hash),
];

impl Provenance {
    /// All of it, each with its name.
    pub(crate) fn facts(&self) -> [(&'static str, &Option<String>); 8] {
        [
            ("kernel_version", &self.kernel_version),
            ("backend_version", &self.backend_version),
            ("layerzero_version", &self.layerzero_version),
            ("capabilities_hash", &self.capabilities_hash),
            ("torch_version", &self.torch_version),
            ("cuda_version", &self.cuda_version),
            ("driver_version", &self.driver_version),
            ("device_uuid", &self.device_uuid),
        ]
    }

    /// Why a time measured with this says nothing about `current`: everything that has changed, in one sentence. What
    /// is unknown on either side does not count as a change.
    ///
    /// ```
    /// use lz_perfdb::Provenance;
    ///
    /// let driver = |version: &str| Provenance { driver_version: Some(version.into()), ..Provenance::default() };
    /// let why = driver("570.86").stale_against(&driver("580.12")).unwrap();
    /// assert_eq!(why, "the driver was 570.86 and is 580.12");
    /// assert_eq!(driver("570.86").stale_against(&Provenance::default()), None);
    /// ```
    pub fn stale_against(&self, current: &Provenance) -> Option<String> {
        let known = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let changed = |(what, of): &(&str, Fact)| {
            let (then, now) = (known(of(self))?, known(of(current))?);
            (then != now).then(|| format!("{what} was {then} and is {now}"))
        };
        let changes: Vec<String> = FACTS.iter().filter_map(changed).collect();
        (!changes.is_empty()).then(|| changes.join(", "))
    }
}

/// The state of the device while it was measured, as versions up to 0.1 noted it; `None` is not known. Nothing goes by it and
/// nothing notes it any more: see `docs/measure.md`. Kept so that their rows and exports are read and handed on as they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Conditions {
    /// How warm it was.
    pub temperature: Option<Temperature>,
    /// How full its memory was.
    pub memory_pressure: Option<MemoryPressure>,
    /// How fast it was allowed to run.
    pub power_state: Option<PowerState>,
}

words! {
    /// How warm a device is.
    Temperature {
        /// Far from its limit.
        Cold = "cold",
        /// At work.
        Warm = "warm",
        /// Near its limit.
        Hot = "hot",
    }
    /// How full a device's memory is.
    MemoryPressure {
        /// Mostly free.
        Low = "low",
        /// In use.
        Medium = "medium",
        /// Nearly full.
        High = "high",
    }
    /// How fast a device is allowed to run.
    PowerState {
        /// Above its nominal clock.
        Boost = "boost",
        /// At its nominal clock.
        Nominal = "nominal",
        /// Below it, by heat or by a power limit.
        Throttled = "throttled",
    }
}
