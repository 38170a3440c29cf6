"""A cache of fixed capacity."""


class Cache:
    """Keeps the `capacity` most recently used keys."""

    def __init__(self, capacity):
        if capacity < 1:
            raise ValueError("capacity must be at least 1")
        self.capacity = capacity
        self._values = {}

    def __len__(self):
        return len(self._values)

    def get(self, key, default=None):
        """The value of `key`, or `default`."""
        return self._values.get(key, default)

    def put(self, key, value):
        """Store a value; the least recently used key makes room for it."""
        if len(self._values) >= self.capacity:
            oldest = next(iter(self._values))
            del self._values[oldest]
        self._values[key] = value
