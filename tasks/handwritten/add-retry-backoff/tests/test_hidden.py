import inspect
import time

from retrying import retry


def always(error):
    def function():
        function.calls += 1
        raise error

    function.calls = 0
    return function


def test_pauses_grow_and_are_capped():
    pauses = []
    function = always(OSError("x"))
    try:
        retry(function, attempts=6, first_s=1.0, factor=2.0, longest_s=5.0, pause=pauses.append)
    except OSError:
        pass
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert function.calls == 6


def test_no_pause_without_a_second_attempt():
    pauses = []
    function = always(OSError("x"))
    try:
        retry(function, attempts=1, pause=pauses.append)
        raise AssertionError("no error")
    except OSError:
        pass
    assert pauses == []
    assert function.calls == 1


def test_only_named_errors_are_retried():
    function = always(KeyError("k"))
    try:
        retry(function, attempts=4, errors=(OSError,), pause=lambda seconds: None)
        raise AssertionError("no error")
    except KeyError:
        pass
    assert function.calls == 1


def test_the_last_error_propagates():
    errors = [OSError("first"), OSError("second")]

    def function():
        raise errors.pop(0)

    try:
        retry(function, attempts=2, pause=lambda seconds: None)
        raise AssertionError("no error")
    except OSError as error:
        assert str(error) == "second"


def test_attempts_are_checked_first():
    function = always(OSError("x"))
    try:
        retry(function, attempts=0)
        raise AssertionError("no error")
    except ValueError:
        pass
    assert function.calls == 0


def test_defaults():
    defaults = {name: p.default for name, p in inspect.signature(retry).parameters.items()}
    assert defaults["first_s"] == 0.1
    assert defaults["longest_s"] == 5.0
    assert defaults["pause"] is time.sleep
