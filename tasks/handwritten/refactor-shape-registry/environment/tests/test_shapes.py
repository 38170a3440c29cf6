from shapes import area, outline


def test_area():
    assert area({"kind": "square", "side": 3}) == 9
    assert area({"kind": "rectangle", "width": 2, "height": 5}) == 10


def test_outline():
    assert outline({"kind": "square", "side": 3}) == 12
    assert outline({"kind": "rectangle", "width": 2, "height": 5}) == 14


def test_unknown_kind():
    for function in (area, outline):
        try:
            function({"kind": "blob"})
        except ValueError as error:
            assert str(error) == "unknown shape: blob"
            continue
        assert False, "no ValueError"
