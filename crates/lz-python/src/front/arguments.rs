//! Puts the arguments of a call into the function's order, or says why they do not fit.

use std::ptr;

use layerzero::model::Signature;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::types::PyString;

use super::{Front, MAX_ARGUMENTS, Slots};
use crate::error;

/// Why arguments do not fit.
pub(super) enum Misfit {
    TooMany(usize),
    Unknown(*mut PyObject),
    Twice(usize),
}

impl Front {
    /// Puts arguments into the function's order, or says which does not fit.
    ///
    /// # Safety
    /// `args` points to `count` positional values followed by one per name in `names`, a tuple or null.
    #[inline]
    pub(super) unsafe fn parse(
        &self,
        args: *const *mut PyObject,
        count: usize,
        names: *mut PyObject,
        slots: &mut Slots,
    ) -> Result<(), Misfit> {
        if count > self.positional {
            return Err(Misfit::TooMany(count));
        }
        // SAFETY: `count` values are there, and no more than there are slots.
        unsafe { ptr::copy_nonoverlapping(args, slots.as_mut_ptr(), count) };
        if names.is_null() {
            return Ok(());
        }
        // SAFETY: `names` is a tuple of strings, and a value follows for each.
        unsafe {
            for i in 0..ffi::PyTuple_Size(names) {
                let name = ffi::PyTuple_GetItem(names, i);
                let at = self.place(name).ok_or(Misfit::Unknown(name))?;
                if !slots[at].is_null() {
                    return Err(Misfit::Twice(at));
                }
                slots[at] = *args.add(count + i as usize);
            }
        }
        Ok(())
    }

    /// The place of an argument: names are interned almost always, so that comparing addresses finds them. Other names are
    /// looked at last.
    #[inline]
    pub(super) fn place(&self, name: *mut PyObject) -> Option<usize> {
        let same = |own: &Py<PyString>| ptr::eq(own.as_ptr(), name);
        // SAFETY: both are live strings.
        let equal = |own: &Py<PyString>| unsafe { ffi::PyUnicode_Compare(own.as_ptr(), name) == 0 };
        let own = self.names.iter().position(same).or_else(|| self.names.iter().position(equal));
        own.or_else(|| self.others.iter().find(|(other, _)| equal(other)).map(|&(_, at)| at))
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refuse(&self, misfit: &Misfit) -> *mut PyObject {
        Python::attach(|py| self.misfit(py, misfit).restore(py));
        ptr::null_mut()
    }

    fn misfit(&self, py: Python<'_>, misfit: &Misfit) -> PyErr {
        let name = self.name();
        let text = match misfit {
            Misfit::TooMany(count) => {
                let most = self.positional;
                format!("{name}() takes at most {most} positional arguments, {count} were given; see help(lz.{name})")
            }
            Misfit::Twice(at) => format!("{name}() got '{}' twice", self.signature.arguments[*at].name),
            Misfit::Unknown(given) => {
                // SAFETY: the name is a live string the caller holds.
                let given = unsafe { Bound::from_borrowed_ptr(py, *given) }.to_string();
                let known = self.signature.arguments.iter().map(|a| a.name);
                let nearest = layerzero::model::nearest(&given, known);
                format!("{name}() has no argument '{given}'{}", layerzero::model::did_you_mean(&nearest))
            }
        };
        error::argument(py, "BAD_ARGUMENTS", &text, "see its signature with help()")
    }

    /// As [`Front::parse`], from Python's own containers. The slots borrow from them.
    pub fn parse_bound(
        &self,
        args: &[Bound<'_, PyAny>],
        kwargs: &[(Bound<'_, PyAny>, Bound<'_, PyAny>)],
        py: Python<'_>,
    ) -> PyResult<Slots> {
        let mut slots: Slots = [ptr::null_mut(); MAX_ARGUMENTS];
        if args.len() > self.positional {
            return Err(self.misfit(py, &Misfit::TooMany(args.len())));
        }
        for (slot, value) in slots.iter_mut().zip(args) {
            *slot = value.as_ptr();
        }
        for (name, value) in kwargs {
            let at = self.place(name.as_ptr()).ok_or_else(|| self.misfit(py, &Misfit::Unknown(name.as_ptr())))?;
            if !slots[at].is_null() {
                return Err(self.misfit(py, &Misfit::Twice(at)));
            }
            slots[at] = value.as_ptr();
        }
        if let Some((at, other)) = self.with_lse {
            let asked = std::mem::replace(&mut slots[at], ptr::null_mut());
            if !asked.is_null() && asked == true.into_pyobject(py)?.as_ptr() {
                let other = Signature::all()[other].function.name;
                let text = format!("{}: calls with return_lse=True are those of '{other}'", self.name());
                return Err(error::argument(py, "BAD_ARGUMENTS", &text, &format!("ask about '{other}'")));
            }
        }
        Ok(slots)
    }
}
