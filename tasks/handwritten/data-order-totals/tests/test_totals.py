import json
import os
import subprocess
import sys
import tempfile


def run(text):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "in.json")
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        done = subprocess.run(
            [sys.executable, "totals.py", path],
            capture_output=True,
            timeout=20,
            check=False,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
        )
    assert done.returncode == 0, done.stderr.decode()[-150:]
    return done.stdout.decode("utf-8")


def order(name, country, *lines, **more):
    return {
        "id": 1,
        "customer": {"name": name, "country": country},
        "lines": [{"sku": "x", "count": c, "price": p} for c, p in lines],
        **more,
    }


def test_example():
    with open("orders.json", encoding="utf-8") as file:
        text = file.read()
    assert run(text) == (
        "country,customer,orders,total\n"
        "DK,Ann,1,39.96\nNO,Ann,1,17.00\nNO,Cy,1,0.30\nSE,Bo,1,0.00\n"
    )


def test_nothing():
    assert run("[]") == "country,customer,orders,total\n"


def test_only_cancelled():
    text = json.dumps([order("A", "NO", (1, 1), cancelled=True), order("B", "NO", (1, 1), cancelled=False)])
    assert run(text) == "country,customer,orders,total\nNO,B,1,1.00\n"


def test_exact_cents():
    lines = [(1, 0.1)] * 10 + [(7, 19.99)]
    assert run(json.dumps([order("A", "NO", *lines)])).splitlines()[1] == "NO,A,1,140.93"


def test_half_cents_to_even():
    text = json.dumps([order("A", "NO", (1, 0.125)), order("B", "NO", (1, 0.135))])
    assert run(text).splitlines()[1:] == ["NO,A,1,0.12", "NO,B,1,0.14"]


def test_quoting_and_letters():
    text = json.dumps([order("Ås, Bo", "NO", (2, 2)), order('Al "X"', "NO")], ensure_ascii=False)
    assert run(text).splitlines()[1:] == ['NO,"Al ""X""",1,0.00', 'NO,"Ås, Bo",1,4.00']
