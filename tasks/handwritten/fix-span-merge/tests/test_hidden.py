from spans import covered, merge


def test_unsorted():
    spans = [(5, 7), (1, 2), (6, 9)]
    assert merge(spans) == [(1, 2), (5, 9)]
    assert spans == [(5, 7), (1, 2), (6, 9)]


def test_nested():
    assert merge([(1, 10), (2, 3), (4, 5)]) == [(1, 10)]


def test_empty_spans_vanish():
    assert merge([]) == []
    assert merge([(3, 3), (1, 2)]) == [(1, 2)]


def test_backward_span():
    for bad in ([(3, 1)], [(0, 5), (9, 8)]):
        try:
            merge(bad)
        except ValueError:
            continue
        assert False, f"no ValueError for {bad}"


def test_covered():
    assert covered([(0, 10), (2, 4), (20, 21)]) == 11


def test_against_slow_count():
    for seed in range(50):
        spans = [((seed * a) % 17, (seed * a) % 17 + a % 5) for a in range(1, 9)]
        numbers = {n for s, e in spans for n in range(s, e)}
        assert covered(spans) == len(numbers)
        ends = [edge for span in merge(spans) for edge in span]
        assert ends == sorted(set(ends))
