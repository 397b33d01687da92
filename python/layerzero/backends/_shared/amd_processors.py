"""Which AMD processor is here. Capabilities cannot name one, so what is written for some of them looks itself."""

import torch


def check_processor(library: str, names: tuple[str, ...]) -> None:
    """Raises `RuntimeError` unless torch was built for ROCm and all its devices are among the processors."""
    if torch.version.hip is None:
        raise RuntimeError(f"torch {torch.__version__} was built without ROCm")
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} finds no ROCm device")
    found = {
        torch.cuda.get_device_properties(device).gcnArchName.partition(":")[0]
        for device in range(torch.cuda.device_count())
    }
    other = sorted(found.difference(names))
    if names and other:
        raise RuntimeError(f"{library} is for {', '.join(names)}, this is {', '.join(other)}")
