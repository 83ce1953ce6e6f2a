"""A short part of the fuzz, always the same; `make test-sanitized` runs the long one."""

import fuzz


def test_random_calls_keep_the_laws():
    well, words = fuzz.supervised(calls=3000, seed=0)
    assert well, words
