import os
import subprocess
import tempfile

LOG = """2024-05-01T10:00:01 INFO start
2024-05-01T10:01:09 ERROR timeout
  at 2024-05-01T10:00:01 INFO not a line
2024-05-01T10:01:12 INFO the word ERROR
2024-05-01T10:02:00 DEBUG x
"""


def run(*arguments, text=""):
    return subprocess.run(
        ["bash", "levels.sh", *arguments], input=text, capture_output=True, text=True, timeout=20, check=False
    )


def test_sample():
    done = run("sample.log")
    assert done.stdout == "4 INFO\n2 WARN\n1 ERROR\n"
    assert done.returncode == 0


def test_standard_input():
    assert run(text=LOG).stdout == "2 INFO\n1 DEBUG\n1 ERROR\n"


def test_several_files():
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number in range(2):
            paths.append(os.path.join(folder, f"log {number}.txt"))
            with open(paths[-1], "w") as file:
                file.write(LOG)
        assert run(*paths).stdout == "4 INFO\n2 DEBUG\n2 ERROR\n"


def test_empty():
    done = run(text="")
    assert done.stdout == ""
    assert done.returncode == 0
    assert run(text="no time stamp here\n").stdout == ""


def test_missing_file():
    done = run("sample.log", "nope.log")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.strip()
