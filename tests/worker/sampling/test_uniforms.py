"""Philox4x32-10 and the uniforms made from it: with a wrong constant they would still look random, but could not be
reproduced elsewhere."""

import numpy as np
import pytest

from worker.sampling.uniforms import philox4x32, uniforms


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known-answer vectors of Random123 (kat_vectors, philox4x32 10).
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], expected: list[int]):
    result = philox4x32(np.array(counter, np.uint32)[:, None], np.array(key, np.uint32)[:, None])
    assert result[:, 0].tolist() == expected


def test_lanes_do_not_mix():
    rng = np.random.default_rng(0)
    counters = rng.integers(0, 2**32, (4, 50), dtype=np.uint32)
    keys = rng.integers(0, 2**32, (2, 50), dtype=np.uint32)
    together = philox4x32(counters, keys)
    for i in range(50):
        assert (philox4x32(counters[:, i : i + 1], keys[:, i : i + 1])[:, 0] == together[:, i]).all()


def test_uniforms_use_every_key_word():
    base = uniforms(np.array([7], np.uint64), np.array([0]), np.array([0]))[0]
    for seed, choice, position in ((8, 0, 0), (7 + 2**32, 0, 0), (7 + 2**63, 0, 0), (7, 1, 0), (7, 0, 1)):
        other = uniforms(np.array([seed], np.uint64), np.array([choice]), np.array([position]))[0]
        assert other != base, (seed, choice, position)


def test_uniforms_have_53_bits_and_stay_below_one():
    words = philox4x32(np.zeros((4, 1), np.uint32), np.zeros((2, 1), np.uint32))[:, 0].tolist()
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    assert uniforms(np.array([0], np.uint64), np.array([0]), np.array([0]))[0] == expected
    many = uniforms(np.full(100_000, 3, np.uint64), np.zeros(100_000), np.arange(100_000))
    assert many.min() >= 0
    assert many.max() < 1
    # Mean and variance within 5 standard errors of 1/2 and 1/12.
    assert abs(many.mean() - 0.5) < 5 * (1 / 12) ** 0.5 / 100_000**0.5
    assert abs(many.var() - 1 / 12) < 5 * (1 / 180) ** 0.5 / 100_000**0.5
