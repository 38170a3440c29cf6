#!/bin/bash
set -eu
python3 - <<'PY'
text = open("lru.py").read()
text = text.replace(
    "        return self._values.get(key, default)\n",
    "        if key not in self._values:\n            return default\n"
    "        self._values[key] = value = self._values.pop(key)\n        return value\n",
)
text = text.replace(
    "        if len(self._values) >= self.capacity:\n",
    "        self._values.pop(key, None)\n        if len(self._values) >= self.capacity:\n",
)
open("lru.py", "w").write(text)
PY
