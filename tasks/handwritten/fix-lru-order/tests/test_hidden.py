from lru import Cache


def test_overwriting_drops_nothing():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("b", 3)
    assert len(cache) == 2
    assert cache.get("a") == 1
    assert cache.get("b") == 3


def test_put_makes_a_key_recent():
    cache = Cache(2)
    cache.put("a", 1)
    cache.put("b", 2)
    cache.put("a", 3)
    cache.put("c", 4)
    assert cache.get("b") is None
    assert cache.get("a") == 3


def test_missing_key_does_not_count():
    cache = Cache(1)
    cache.put("a", 1)
    assert cache.get("x", 9) == 9
    assert len(cache) == 1
    assert cache.get("a") == 1


def test_none_is_a_value():
    cache = Cache(2)
    cache.put("a", None)
    cache.put("b", 2)
    assert cache.get("a", 7) is None
    cache.put("c", 3)
    assert cache.get("b", "gone") == "gone"


def test_capacity_one():
    cache = Cache(1)
    for number in range(5):
        cache.put(number, number)
    assert len(cache) == 1
    assert cache.get(4) == 4
