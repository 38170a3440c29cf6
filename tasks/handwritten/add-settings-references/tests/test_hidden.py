from settings import parse


def test_order_does_not_matter():
    assert parse("a = <${b}>\nb = ${c}${c}\nc = x\n") == {"a": "<xx>", "b": "xx", "c": "x"}


def test_dollars():
    assert parse("a = $$5 and $x and $\nb = $${a}\n") == {"a": "$5 and $x and $", "b": "${a}"}


def test_a_value_that_looks_like_a_reference_is_not_read_twice():
    assert parse("a = $${b}\nb = ${a}!\n") == {"a": "${b}", "b": "${b}!"}


def test_unknown_name():
    try:
        parse("a = ${nope}\n")
    except KeyError as error:
        assert error.args == ("nope",)
        return
    assert False, "no KeyError"


def test_circles():
    for text in ("a = ${a}\n", "a = ${b}\nb = ${c}\nc = ${a}\n"):
        try:
            parse(text)
        except ValueError:
            continue
        assert False, f"no ValueError for {text!r}"


def test_twice_used_is_no_circle():
    assert parse("x = 1\ny = ${x}\nz = ${x}${y}${x}\n")["z"] == "111"


def test_last_key_wins():
    assert parse("# note\n\na = 1\nb = ${a}\na = 2\n") == {"a": "2", "b": "2"}


def test_no_setting():
    try:
        parse("just words\n")
    except ValueError:
        return
    assert False, "no ValueError"
