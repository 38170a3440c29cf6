from graph import order, targets


def test_smallest_first():
    assert order({"z": [], "m": [], "a": ["z"]}) == ["m", "z", "a"]
    assert order({"d": ["b", "c"], "b": ["a"], "c": ["a"], "a": []}) == ["a", "b", "c", "d"]


def test_only_needed():
    needs = {"app": ["lib", "zip"]}
    assert order(needs) == ["lib", "zip", "app"]
    assert needs == {"app": ["lib", "zip"]}


def test_nothing():
    assert order({}) == []


def test_twice_needed():
    assert order({"b": ["a", "a"], "a": []}) == ["a", "b"]


def test_circle_is_named():
    try:
        order({"ok": [], "x1": ["y2", "ok"], "y2": ["w3"], "w3": ["x1"]})
    except ValueError as error:
        assert all(name in str(error) for name in ("x1", "y2", "w3"))
        return
    assert False, "no ValueError"


def test_self_need():
    try:
        order({"solo": ["solo"]})
    except ValueError as error:
        assert "solo" in str(error)
        return
    assert False, "no ValueError"


def test_long_chain():
    names = [f"t{i:05d}" for i in range(5000)]
    needs = {name: [before] for before, name in zip(names, names[1:])}
    assert order(needs) == names
    assert targets(needs) == names
