"""The random numbers of draws: Philox4x32-10, a function of (seed, choice, output position) alone."""

import numpy as np

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_WEYL_0, _WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter_4N: np.ndarray, key_2N: np.ndarray) -> np.ndarray:
    """Runs ten rounds over N counters at once.

    counter_4N: uint32 [4, N]. key_2N: uint32 [2, N]. Returns uint32 [4, N].
    """
    # 64-bit lanes hold the 32x32-bit products; masks do the wrapping, so that nothing overflows.
    c0, c1, c2, c3 = counter_4N.astype(np.uint64)
    k0, k1 = key_2N.astype(np.uint64)
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (product1 >> _HALF) ^ c1 ^ k0, product1 & _LOW, (product0 >> _HALF) ^ c3 ^ k1, product0 & _LOW
        k0, k1 = (k0 + _WEYL_0) & _LOW, (k1 + _WEYL_1) & _LOW
    return np.stack((c0, c1, c2, c3)).astype(np.uint32)


def uniforms(seeds_N: np.ndarray, choices_N: np.ndarray, positions_N: np.ndarray) -> np.ndarray:
    """Returns one number in [0, 1) for each (seed, choice, output position).

    seeds_N: uint64 [N]. choices_N, positions_N: integers below 2**32, [N]. Result: float64 [N], multiples of 2**-53.

    The seed is the key and (position, choice, 0, 0) the counter; the first two words of the output give 27 and 26 bits,
    as NumPy's Generator.random takes them from a 64-bit word.
    """
    seeds_N = seeds_N.astype(np.uint64)
    zeros_N = np.zeros_like(seeds_N)
    key_2N = np.stack((seeds_N & _LOW, seeds_N >> _HALF))
    counter_4N = np.stack((positions_N.astype(np.uint64), choices_N.astype(np.uint64), zeros_N, zeros_N))
    words_4N = philox4x32(counter_4N, key_2N).astype(np.float64)
    high_N, low_N = np.floor(words_4N[0] / 32), np.floor(words_4N[1] / 64)
    return (high_N * 2.0**26 + low_N) * 2.0**-53
