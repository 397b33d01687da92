"""Dropout by libraries that draw from the device's default generator."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_turn = threading.Lock()


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    return torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[device.index]


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """What is drawn on the device is a function of the seed; afterwards its generator stands where it stood."""
    generator = generator_of(device)
    with _turn:
        state = generator.get_state()
        generator.manual_seed(seed)
        try:
            yield
        finally:
            generator.set_state(state)
