from settings import parse


def test_plain():
    assert parse("a = 1\nb = two words\n") == {"a": "1", "b": "two words"}


def test_reference():
    assert parse("root = /srv\ndata = ${root}/data\n") == {"root": "/srv", "data": "/srv/data"}
