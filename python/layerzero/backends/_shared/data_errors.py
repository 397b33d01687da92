"""Errors for data no kernel can serve: the same as the references give. Looking for the culprit costs nothing until then."""

from torch import Tensor

from ...errors import InvalidCallError


def bad_data(
    place: str, value: float, expected: str, hint: str = "correct the data; no kernel can serve it"
) -> InvalidCallError:
    """The error for a number that cannot stand where it stands."""
    return InvalidCallError(f"{place} is {value}, {expected}", code="BAD_DATA", hint=hint)


def bad_index(name: str, indices: Tensor, limit: int) -> InvalidCallError:
    """The error for the first of these that is no index from 0 to below `limit`."""
    place = ((indices < 0) | (indices >= limit)).nonzero()[0].tolist()
    return bad_data(f"{name}{place}", int(indices[tuple(place)].item()), f"expected an index from 0 to below {limit}")


def bad_number(name: str, numbers: Tensor, valid: Tensor, expected: str) -> InvalidCallError:
    """The error for the first of these that is not valid."""
    place = (~valid).nonzero()[0].tolist()
    return bad_data(f"{name}{place}", float(numbers[tuple(place)]), expected)


def check_indices(name: str, indices: Tensor, limit: int) -> None:
    """Raises unless all of them are indices from 0 to below `limit`."""
    if indices.numel() and (int(indices.min()) < 0 or int(indices.max()) >= limit):
        raise bad_index(name, indices, limit)
