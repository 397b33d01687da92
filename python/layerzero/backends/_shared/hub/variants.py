"""What a variant of a hub kernel was built for, by the name of its folder, against what is here.

The names are those of the `kernels` package (0.16, `variants.py`): `torch211-cxx11-cu130-x86_64-linux`, with
`torch-stable-abi210` in front where it goes by torch's stable ABI, or `torch-cuda`, `torch-universal` where it has no
compiled code.
"""

import platform
import re
import sys

import torch

_COMPILED = re.compile(
    r"(?:torch(?P<torch>\d{2,})(?:-(?P<abi>cxx11|cxx98))?|torch-stable-abi(?P<stable>\d{2,}))"
    r"-(?P<backend>[a-z]+)(?P<version>\d*)-(?P<machine>\w+)-(?P<system>[a-z]+)"
)
_PLAIN = re.compile(r"torch-(?P<backend>[a-z]+)")


def mismatch(name: str) -> str | None:
    """One line where a variant does not fit this torch, its ABI, its CUDA or this machine."""
    if (plain := _PLAIN.fullmatch(name)) is not None:
        backend = plain["backend"]
        here = _backend()[0]
        return None if backend in ("universal", here) else f"{name} is for {backend}; torch here is for {here}"
    found = _COMPILED.fullmatch(name)
    if found is None:
        return f"'{name}' is no variant whose build is known"
    other = [*_framework(found), *_hardware(found)]
    return f"{name} was built for {' and '.join(other)}; there is {_here()}" if other else None


def _framework(found: re.Match[str]) -> list[str]:
    here = _numbers(torch.__version__)
    if found["stable"] is not None:
        stable = _split(found["stable"])
        return [f"torch {stable[0]}.{stable[1]} or newer"] if stable > here else []
    other = []
    built = _split(found["torch"])
    if built != here:
        other.append(f"torch {built[0]}.{built[1]}")
    if found["abi"] is not None and (found["abi"] == "cxx11") != torch.compiled_with_cxx11_abi():
        other.append(f"the C++ ABI {found['abi']}")
    return other


def _hardware(found: re.Match[str]) -> list[str]:
    other = []
    here, version = _backend()
    backend, built = {"cu": "cuda"}.get(found["backend"], found["backend"]), found["version"]
    shown = f"{backend} {'.'.join(map(str, _split(built)))}" if built else backend
    if backend != here:
        other.append(shown)
    elif built and version is not None and here in ("cuda", "rocm"):
        # Of one major version of CUDA a later minor one runs what was built for an earlier one.
        major, minor = _split(built)
        fits = major == version[0] and (minor <= version[1] if here == "cuda" else minor == version[1])
        other += [] if fits else [shown]
    machine = {"arm64": "aarch64"}.get(platform.machine(), platform.machine()).lower()
    if {"arm64": "aarch64"}.get(found["machine"], found["machine"]) != machine or found["system"] != sys.platform:
        other.append(f"{found['machine']}-{found['system']}")
    return other


def _backend() -> tuple[str, tuple[int, int] | None]:
    """What torch is built for, and in which version."""
    version = torch.version
    for name, told in (("cuda", version.cuda), ("rocm", version.hip), ("xpu", getattr(version, "xpu", None))):
        if told is not None:
            return name, _numbers(told)
    return ("metal" if sys.platform == "darwin" else "cpu"), None


def _here() -> str:
    name, version = _backend()
    backend = name if version is None else f"{name} {version[0]}.{version[1]}"
    abi = "cxx11" if torch.compiled_with_cxx11_abi() else "cxx98"
    return f"torch {torch.__version__} ({abi}) with {backend} on {platform.machine()}-{sys.platform}"


def _split(digits: str) -> tuple[int, int]:
    """`211` is 2.11 of torch, `130` is 13.0 of CUDA: of torch the first digit is the major version, of CUDA all but the
    last."""
    if len(digits) >= 3 and digits[0] != "2":
        return int(digits[:-1]), int(digits[-1])
    return int(digits[0]), int(digits[1:] or 0)


def _numbers(version: str) -> tuple[int, int]:
    major, minor = (*re.findall(r"\d+", version), "0", "0")[:2]
    return int(major), int(minor)
