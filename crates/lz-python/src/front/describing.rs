//! Describes a call by words that decide which kernel serves it, without making a Python object.

use layerzero::OverlayId;
use pyo3::ffi;

use super::{Front, Slots, places};
use crate::route::Route;
use crate::torch::{EVERY_SDPA, Torch};
use crate::words::{Expected, Take};
use crate::{memory, words};

impl Front {
    /// Describes a call by words, if all of it is plain, and gives the first of them. `None` sends it to the slow path, or
    /// says that the words are not those that were expected.
    ///
    /// # Safety
    /// The slots hold live objects, and this thread holds the interpreter.
    #[inline]
    pub(super) unsafe fn describe(&self, slots: &Slots, overlay: OverlayId, words: &mut impl Take) -> Option<u64> {
        let torch = Torch::known()?;
        let borrow = torch.borrow?;
        let surroundings = torch.surroundings_on_host();
        if surroundings.special {
            return None;
        }
        // SAFETY: none is a static object.
        let none = unsafe { ffi::Py_None() };
        let mut present = 0u32;
        for (at, &slot) in slots.iter().enumerate().take(self.names.len()) {
            present |= u32::from(!slot.is_null() && slot != none) << at;
        }
        if present & self.careful_bits != 0 {
            return None;
        }
        // The CUDA device, if the call is made on one.
        let mut cuda = None;
        for at in places(present & (self.tensor_bits | self.out_bits)) {
            if !torch.is_plain(slots[at]) {
                return None;
            }
            // SAFETY: the object is a live, plain tensor.
            unsafe {
                let wants_grad = surroundings.grad && torch.wants_grad(slots[at]);
                match torch.fields.as_ref().and_then(|fields| fields.read(slots[at])) {
                    Some(tensor) => {
                        cuda = cuda.or(tensor.cuda());
                        if !words::seen(words, &tensor, wants_grad) {
                            return None;
                        }
                    }
                    None => cuda = cuda.or(words.ask(torch, borrow, slots[at], wants_grad)?),
                }
            };
        }
        let mut capturing = false;
        if let Some(device) = cuda {
            if torch.is_autocast_on_cuda() {
                return None;
            }
            capturing = words.capturing(torch, device)?;
        }
        for at in places(present & self.scalar_bits) {
            // SAFETY: slots hold live objects.
            if !unsafe { words::scalar(words, slots[at]) } {
                return None;
            }
        }
        for at in places(present & self.sizes_bits) {
            // SAFETY: slots hold live objects.
            if !unsafe { words::one_size(words, slots[at]) } {
                return None;
            }
        }
        // On the host a time depends on how many threads there are.
        let threads = if cuda.is_none() { torch.threads() } else { 0 };
        let decides = self.tensor_bits | self.scalar_bits | self.sizes_bits | self.out_bits;
        let present = u64::from(present & decides);
        if !words.word(present | u64::from(threads) << 32) {
            return None;
        }
        let mut state = u64::from(surroundings.deterministic) << 16 | u64::from(capturing) << 17;
        if self.is_torch_attention {
            let allowed = torch.sdpa_allowed();
            if allowed != EVERY_SDPA {
                let choice = words.sdpa(torch)?;
                if !words.word(choice) {
                    return None;
                }
            }
            state |= u64::from(allowed) << 18;
        }
        Some(self.index as u64 | state | u64::from(overlay.0) << 32)
    }

    /// What was decided for a call, if it is just as the last one of this function was: without describing it.
    ///
    /// # Safety
    /// As [`Front::describe`].
    #[inline]
    pub(super) unsafe fn again(&self, slots: &Slots, overlay: OverlayId, version: u64) -> Option<Route> {
        // Where tensors are not read in place, Python functions tell what surrounds a call.
        Torch::known()?.fields.as_ref()?;
        // SAFETY: passed on. Describing runs no Python code: torch's symbols are there, or its fields would not have been
        // looked for, and what is not to be had without is not asked.
        unsafe {
            memory::last(self.index, version, |words| {
                let mut expected = Expected::new(words);
                let head = self.describe(slots, overlay, &mut expected);
                head.is_some_and(|head| expected.is_complete(head))
            })
        }
    }
}
