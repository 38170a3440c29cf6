from retrying import retry


def test_returns_the_first_success():
    calls = []

    def flaky():
        calls.append(1)
        if len(calls) < 3:
            raise OSError("busy")
        return "ok"

    assert retry(flaky, attempts=5, pause=lambda seconds: None) == "ok"
    assert len(calls) == 3
