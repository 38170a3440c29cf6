"""A name and version from the package index, or a local checkout, to a `Project` that can be run in a
sandbox.

The source distribution is fetched with the user's own pip, unpacked without links or absolute paths, cleared
of version control, caches and build output, and given a folder `.site` with pytest, the project's
requirements and those of its declared test requirements that its tests import: pure Python only, so that the
folder can be laid into any sandbox. What can not be done is a `Rejected` with a named cause; nothing of the
project is executed here except by pip.
"""

from __future__ import annotations

import ast
import compileall
import email.parser
import hashlib
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

SITE = ".site"
"""Where requirements lie in the workdir."""
TEST_RUNNER = "pytest>=8.2,<8.4"
"""Before the versions that load a syntax highlighter at every start: each verification pays for it."""
PIP_DEADLINE_S = 600.0
LARGEST_FILE_BYTES = 2 * 1024 * 1024
LARGEST_TREE_BYTES = 40 * 1024 * 1024
TEST_GROUPS = re.compile(r"test|dev|check|ci", re.IGNORECASE)
"""Extras and dependency groups whose requirements tests may want."""
_DROPPED = frozenset(
    {".git", ".hg", ".svn", ".bzr", ".jj", "__pycache__", ".tox", ".nox", ".venv", "venv", ".mypy_cache",
     ".pytest_cache", ".ruff_cache", ".hypothesis", ".eggs", "build", "dist", "node_modules", ".github", SITE}
)  # fmt: skip
"""Folders that are history, caches or copies of the project: none of them goes into a task."""
_DROPPED_ENDS = (
    ".pyc",
    ".pyo",
    ".orig",
    ".rej",
    ".patch",
    ".diff",
    ".so",
    ".pyd",
    ".egg-info",
    "~",
    ".bundle",
)
_TEST_FOLDERS = frozenset({"test", "tests", "testing"})


class Rejected(Exception):
    """A project or mutant that no task can be made of. `cause` is a short name for tables."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """A project ready to be mutated. Paths are relative to `tree`."""

    name: str
    version: str
    origin: str
    """What was asked for, without a machine path: `name==version`, or `checkout:name`."""
    digest: str
    """sha256 over the archive, or over the checkout's files."""
    licence: str
    summary: str
    homepage: str
    tree: str
    """Folder that becomes the workdir, `.site` included."""
    sources: tuple[str, ...]
    """Folders to be put on the import path; the empty one is the workdir."""
    tests: tuple[str, ...]
    """Test files."""
    suite: tuple[str, ...]
    """Folders and files that the tests need beside them: what is copied for grading and protected."""
    requirements: tuple[str, ...]
    """What pip put into `.site`, as `name==version`."""

    @property
    def slug(self) -> str:
        return str(canonicalize_name(self.name))


def fetch(spec: str, work: Path, *, runner: Path, extra: Sequence[str] = ()) -> Project:
    """The project in `work`; a second call returns what is there. `Rejected` says why not.

    Args:
        spec: `name==version`, or the path of a checkout.
        runner: what `install_runner` made.
        extra: further requirements for `.site` (`--with`).
    """
    done = work / "project.json"
    if done.is_file():
        noted = json.loads(done.read_text(encoding="utf-8"))
        lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in noted.items()}
        return Project(**{**lists, "tree": str(work / "tree")})
    tree = work / "tree"
    for stale in (tree, work / "download"):
        shutil.rmtree(stale, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    local = _checkout(spec)
    if local is not None:
        origin, source, digest = f"checkout:{local.resolve().name}", local.resolve(), ""
    else:
        archive = _download(spec, work / "download")
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        origin, source = spec, _unpack(archive, work / "download" / "unpacked")
    _copy(source, tree)
    digest = digest or _tree_digest(tree)
    facts = _metadata(source, fallback=source.name)
    if canonicalize_name(facts["name"]) in {"pytest", "pluggy", "iniconfig", "packaging"}:
        raise Rejected("part_of_pytest", f"{facts['name']} is a part of the test runner itself.")
    sources = _source_folders(tree)
    tests = _test_files(tree)
    if not tests:
        raise Rejected("no_tests", f"{origin} brings no test files.")
    wanted = _requirements(facts, tree, tests, sources)
    shutil.copytree(runner, tree / SITE)
    if wanted or extra:
        _install(tree / SITE, (*wanted, *extra))
        _compile(tree / SITE)
    installed = _installed(tree / SITE)
    _write_metadata(tree / SITE, facts)
    project = Project(
        name=facts["name"],
        version=facts["version"],
        origin=origin,
        digest=digest,
        licence=facts["licence"],
        summary=facts["summary"],
        homepage=facts["homepage"],
        tree=str(tree),
        sources=sources,
        tests=tests,
        suite=_suite(tree, tests),
        requirements=installed,
    )
    shutil.rmtree(work / "download", ignore_errors=True)
    written = done.with_suffix(".part")
    written.write_text(json.dumps({**asdict(project), "tree": ""}), encoding="utf-8")
    written.replace(done)
    return project


def pinned(project: Project) -> tuple[str, ...]:
    """Names of modules that tests take from `.site` and never from the workdir, where an attempt may have put
    one by the same name: pytest, and all that is installed and not the project's own."""
    tree = Path(project.tree)

    def names(folder: Path) -> set[str]:
        modules = [p for p in folder.iterdir() if p.suffix == ".py" or (p.is_dir() and p.suffix == "")]
        return {p.stem for p in modules if not p.stem.startswith("__")}

    own = {name for source in project.sources for name in names(tree / source)}
    return tuple(sorted(names(tree / SITE) - own))


def _checkout(spec: str) -> Path | None:
    path = Path(spec)
    if path.is_dir():
        return path
    if "/" in spec or spec.startswith("."):
        raise Rejected("not_found", f"There is no folder {spec}.")
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*==[A-Za-z0-9.!+_-]+", spec):
        raise Rejected("bad_name", f"'{spec}' is neither a folder nor NAME==VERSION.")
    return None


# ----------------------------------------------------------------------------------------------------- source


def _pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pip", *arguments, "--disable-pip-version-check", "--no-input"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=PIP_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise Rejected("index_timeout", f"pip gave no answer within {PIP_DEADLINE_S:g} s.") from error


def _last_error(done: subprocess.CompletedProcess[str]) -> str:
    if "No module named pip" in done.stderr:
        return "this Python has no pip: run `python -m ensurepip`"
    lines = [
        line for line in done.stderr.splitlines() if line.startswith("ERROR")
    ] or done.stderr.splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"


def _download(spec: str, folder: Path) -> Path:
    done = _pip("download", "--no-deps", "--no-binary", ":all:", "--dest", str(folder), spec)
    if done.returncode != 0:
        cause = "not_in_index" if "No matching distribution" in done.stderr else "needs_build_tools"
        raise Rejected(cause, f"{spec}: {_last_error(done)}")
    return next(p for p in sorted(folder.iterdir()) if p.is_file())


def _unpack(archive: Path, folder: Path) -> Path:
    folder.mkdir(parents=True)
    try:
        if archive.suffix == ".zip":
            with zipfile.ZipFile(archive) as file:
                file.extractall(folder)
        else:
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
    except (tarfile.TarError, zipfile.BadZipFile, OSError) as error:
        raise Rejected("bad_archive", f"{archive.name}: {error}") from error
    inside = [p for p in folder.iterdir() if p.is_dir()]
    return inside[0] if len(inside) == 1 else folder


def _copy(source: Path, tree: Path) -> None:
    """Files only, without history, caches and large data."""
    total = 0
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(f for f in folders if f not in _DROPPED and not f.endswith(_DROPPED_ENDS))
        for name in sorted(files):
            path = Path(folder, name)
            if path.is_symlink() or name.endswith(_DROPPED_ENDS) or not path.is_file() or name == ".git":
                continue
            size = path.stat().st_size
            if size > LARGEST_FILE_BYTES:
                continue
            total += size
            if total > LARGEST_TREE_BYTES:
                raise Rejected("too_large", f"More than {LARGEST_TREE_BYTES >> 20} MiB of files.")
            target = tree / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
            target.chmod(0o755 if path.stat().st_mode & 0o111 else 0o644)


def _tree_digest(tree: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(p for p in tree.rglob("*") if p.is_file()):
        digest.update(str(path.relative_to(tree)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


# --------------------------------------------------------------------------------------------------- metadata


def _metadata(source: Path, *, fallback: str) -> dict[str, Any]:
    """What PKG-INFO says, else pyproject.toml."""
    facts: dict[str, Any] = {
        "name": fallback,
        "version": "0",
        "licence": "unknown",
        "summary": "",
        "homepage": "",
    }
    facts |= {"requires": [], "test_requires": []}
    table = _pyproject(source)
    project = table.get("project", {})
    groups = [*project.get("optional-dependencies", {}).items(), *table.get("dependency-groups", {}).items()]
    facts["test_requires"] = [
        r for name, items in groups if TEST_GROUPS.search(name) for r in items if isinstance(r, str)
    ]
    info = source / "PKG-INFO"
    if info.is_file():
        message = email.parser.Parser().parsestr(info.read_text(encoding="utf-8", errors="replace"))
        facts["name"], facts["version"] = message["Name"] or fallback, message["Version"] or "0"
        facts["summary"] = (message["Summary"] or "").strip()
        urls = [u.partition(",")[2].strip() for u in message.get_all("Project-URL") or []]
        facts["homepage"] = message["Home-page"] or next(iter(urls), "")
        classifiers = [c.split(" :: ")[-1] for c in message.get_all("Classifier") or [] if "License ::" in c]
        short = (message["License"] or "").strip()
        short = short if 0 < len(short) < 60 and "\n" not in short and short != "UNKNOWN" else ""
        facts["licence"] = message["License-Expression"] or short or next(iter(classifiers), "unknown")
        facts["requires"] = message.get_all("Requires-Dist") or []
        facts["test_requires"] += [r for r in facts["requires"] if "extra ==" in r and TEST_GROUPS.search(r)]
        return facts
    licence = project.get("license", "unknown")
    licence = licence.get("text", "unknown") if isinstance(licence, dict) else licence
    return facts | {
        "name": project.get("name", fallback),
        "version": project.get("version", "0"),
        "licence": licence,
        "summary": project.get("description", ""),
        "homepage": next(iter(project.get("urls", {}).values()), ""),
        "requires": list(project.get("dependencies", [])),
    }


def _pyproject(source: Path) -> dict[str, Any]:
    file = source / "pyproject.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        return {}


def _write_metadata(site: Path, facts: dict[str, Any]) -> None:
    """So that `importlib.metadata.version` finds the project, which is not installed."""
    folder = site / f"{re.sub(r'[-_.]+', '_', facts['name'])}-{facts['version']}.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: {facts['name']}\nVersion: {facts['version']}\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------------ sources and tests


def _is_test_file(name: str) -> bool:
    return name.endswith(".py") and (
        name.startswith("test_") or name.endswith("_test.py") or name == "tests.py"
    )


def _source_folders(tree: Path) -> tuple[str, ...]:
    """`src` and its like come first; the workdir itself is always importable."""
    return (
        tuple(name for name in ("src", "lib") if any((tree / name).glob("*/__init__.py")))
        + (
            ("src",)
            if any((tree / "src").glob("*.py")) and not any((tree / "src").glob("*/__init__.py"))
            else ()
        )
        + ("",)
    )


def _test_files(tree: Path) -> tuple[str, ...]:
    found = []
    for path in sorted(tree.rglob("*.py")):
        parts = path.relative_to(tree).parts
        if (
            SITE in parts
            or not _is_test_file(path.name)
            or set(parts) & {"examples", "docs", "doc", "benchmarks"}
        ):
            continue
        if len(parts) == 1 or set(parts[:-1]) & _TEST_FOLDERS:
            found.append("/".join(parts))
    return tuple(found)


def _suite(tree: Path, tests: Sequence[str]) -> tuple[str, ...]:
    """The topmost test folder of each test file, or the file itself, and the conftest.py files above."""
    wanted = set()
    for name in tests:
        parts = name.split("/")
        depth = next((i + 1 for i, part in enumerate(parts[:-1]) if part in _TEST_FOLDERS), len(parts))
        wanted.add("/".join(parts[:depth]))
        for above in range(depth):
            place = "/".join((*parts[:above], "conftest.py"))
            if (tree / place).is_file():
                wanted.add(place)
    return tuple(sorted(wanted))


# ----------------------------------------------------------------------------------------------- requirements


def _imports(paths: Sequence[Path]) -> set[str]:
    """First words of what files import."""
    found = set()
    for path in paths:
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                found.add(node.module.split(".")[0])
    return found


def _requirements(
    facts: dict[str, Any], tree: Path, tests: Sequence[str], sources: Sequence[str]
) -> tuple[str, ...]:
    folders = {(tree / t).parent for t in tests}
    imported = {canonicalize_name(n) for n in _imports([p for f in folders for p in f.rglob("*.py")])}
    wanted = []
    for text in facts["requires"]:
        requirement = _requirement(text)
        if requirement is not None and "extra" not in str(requirement.marker or ""):
            wanted.append(str(requirement))
    for text in facts["test_requires"]:
        requirement = _requirement(text)
        if requirement is None or canonicalize_name(requirement.name) == "pytest":
            continue
        if canonicalize_name(requirement.name) in imported:
            requirement.marker = None
            wanted.append(str(requirement))
    return tuple(dict.fromkeys(wanted))


def _requirement(text: str) -> Requirement | None:
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None


def install_runner(folder: Path) -> Path:
    """pytest and what it needs, in a folder that is copied into every project."""
    if not folder.is_dir():
        building = folder.with_name(folder.name + ".building")
        shutil.rmtree(building, ignore_errors=True)
        _install(building, (TEST_RUNNER,))
        _compile(building)
        building.rename(folder)
    return folder


def _install(site: Path, requirements: Sequence[str]) -> None:
    done = _pip("install", "--target", str(site), "--no-compile", "--only-binary", ":all:", *requirements)
    if done.returncode != 0:
        raise Rejected("needs_build_tools", f"Its requirements can not be installed: {_last_error(done)}")
    native = next((p for p in site.rglob("*") if p.suffix in (".so", ".pyd", ".dylib")), None)
    if native is not None:
        raise Rejected("native_requirement", f"{native.relative_to(site)} is not pure Python.")
    shutil.rmtree(site / "bin", ignore_errors=True)


def _installed(site: Path) -> tuple[str, ...]:
    return tuple(
        sorted(p.name.removesuffix(".dist-info").replace("-", "==", 1) for p in site.glob("*.dist-info"))
    )


def _compile(site: Path) -> None:
    """Bytecode that holds whatever the times of the files are: a verifier pays a second without it."""
    compileall.compile_dir(site, quiet=2, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
