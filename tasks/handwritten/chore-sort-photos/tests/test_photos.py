import os

MOVED = {
    "2023/12/24-001.jpg": ("IMG_20231224_1.jpg", "2\n"),
    "2024/03/05-001.jpg": ("IMG_20240305_1.jpg", "0\n"),
    "2024/03/05-002.jpg": ("IMG_20240305_2.jpg", "1\n"),
    "2024/03/05-010.jpg": ("IMG_20240305_10.jpg", "3\n"),
}
KEPT = {"notes.txt": "4\n", "IMG_2024_1.jpg": "5\n", " IMG_20240101_7.jpg": "6\n"}


def read(path):
    full = os.path.join("photos", path)
    assert not os.path.islink(full), f"{path} is a link"
    with open(full) as file:
        return file.read()


def test_moved():
    for path, (_, content) in MOVED.items():
        assert read(path) == content


def test_others_stay():
    for path, content in KEPT.items():
        assert read(path) == content


def test_nothing_else():
    found = {
        os.path.relpath(os.path.join(folder, name), "photos")
        for folder, _, names in os.walk("photos")
        for name in names
    }
    assert found == {*MOVED, *KEPT, "index.txt"}


def test_index():
    lines = [f"{path}\t{old}\n" for path, (old, _) in sorted(MOVED.items())]
    assert read("index.txt") == "".join(lines)
