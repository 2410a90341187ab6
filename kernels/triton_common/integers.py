"""Integer functions for launches. Triton's own, which also serve kernels, take 5 us a call on the host."""


def cdiv(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least number, which is above 0."""
    return 1 << (number - 1).bit_length()
