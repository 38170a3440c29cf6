from durations import parse, show


def test_parse():
    assert parse("90s") == 90
    assert parse("1h30m") == 5400


def test_show():
    assert show(90) == "1m30s"
    assert show(7200) == "2h"
