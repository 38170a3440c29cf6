from durations import parse, show


def test_all_units():
    assert parse("1d2h3m4s") == 93784
    assert parse("48h") == 172800
    assert parse("0s") == 0


def test_nonsense_is_refused():
    for text in ("", "5", "m", "1m1h", "1h1h", "-1s", "1 h", "1h ", "1x", "1.5h", "h1", "1h30"):
        try:
            parse(text)
        except ValueError:
            continue
        assert False, f"no ValueError for {text!r}"


def test_show_is_shortest():
    assert show(0) == "0s"
    assert show(86400) == "1d"
    assert show(3661) == "1h1m1s"
    assert show(93784) == "1d2h3m4s"


def test_negative_is_refused():
    try:
        show(-1)
    except ValueError:
        return
    assert False, "no ValueError"


def test_there_and_back():
    for number in [*range(0, 8000, 7), 86399, 86400, 172801, 999999]:
        assert parse(show(number)) == number
