from csvline import split


def test_plain():
    assert split("a,b,c") == ["a", "b", "c"]


def test_quoted_comma():
    assert split('a,"b,c",d') == ["a", "b,c", "d"]
