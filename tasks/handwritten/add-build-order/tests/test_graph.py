from graph import order


def test_simple_chain():
    assert order({"c": ["b"], "b": ["a"], "a": []}) == ["a", "b", "c"]


def test_circle():
    try:
        order({"a": ["b"], "b": ["a"]})
    except ValueError:
        return
    assert False, "no ValueError"
