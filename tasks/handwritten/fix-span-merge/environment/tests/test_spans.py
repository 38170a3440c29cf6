from spans import merge


def test_overlap():
    assert merge([(1, 4), (3, 6)]) == [(1, 6)]


def test_touching_spans_become_one():
    assert merge([(1, 3), (3, 5)]) == [(1, 5)]


def test_apart():
    assert merge([(1, 2), (4, 5)]) == [(1, 2), (4, 5)]
