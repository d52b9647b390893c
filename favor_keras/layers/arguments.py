"""Checks of constructor arguments."""

import numbers


def check_positive(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a positive integer, received {value!r}")


def check_rate(name, value):
    if not isinstance(value, numbers.Real) or not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), received {value!r}")


def check_probability(name, value):
    if not isinstance(value, numbers.Real) or not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], received {value!r}")


def check_seed(value):
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"seed must be an integer or None, received {value!r}")
    if value is not None and abs(value) >= 2**63:
        raise ValueError(f"seed must have at most 63 bits, received {value}")


def check_size_or_zero(name, value):
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be 0 or a positive integer, received {value!r}")
