from csvline import split


def test_doubled_quotes():
    assert split('"say ""hi""",2') == ['say "hi"', "2"]
    assert split('""""') == ['"']


def test_empty_fields():
    assert split("") == [""]
    assert split(",") == ["", ""]
    assert split('"",x,') == ["", "x", ""]


def test_several_commas():
    assert split('"a,,b",",",c') == ["a,,b", ",", "c"]


def test_spaces_stay():
    assert split(" a ,b") == [" a ", "b"]


def test_unclosed_quote():
    for line in ('"a', 'x,"y', '"a""'):
        try:
            split(line)
        except ValueError:
            continue
        assert False, f"no ValueError for {line!r}"
