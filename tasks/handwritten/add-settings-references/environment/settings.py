"""A settings file to a dict."""


def parse(text):
    """Keys and values of `key = value` lines."""
    values = {}
    for line in text.splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, mark, value = line.partition("=")
        if not mark:
            raise ValueError(f"not a setting: {line}")
        values[key.strip()] = value.strip()
    return values
