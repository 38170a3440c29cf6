"""Sample rows and folders of each format, small enough to read, all about one function."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEST_FILE = "tests/test_calc.py"
FAILS, PASSES = "tests/test_calc.py::test_add", "tests/test_calc.py::test_sub"
FIX = """\
diff --git a/calc.py b/calc.py
--- a/calc.py
+++ b/calc.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a - b
+    return a + b
"""
BREAK = FIX.replace("-    return a - b\n+    return a + b", "-    return a + b\n+    return a - b")
TEST_PATCH = """\
diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -2,3 +2,7 @@

 def test_sub():
     assert add(3, 0) == 3
+
+
+def test_add():
+    assert add(1, 2) == 3
"""
EVAL = """\
#!/bin/bash
set -uxo pipefail
cd /testbed
git -c safe.directory='*' apply -v - <<'EOF_1'
{patch}EOF_1
: '>>>>> Start Test Output'
python3 run_tests.py {file}
SWEBENCH_TEST_EXIT_CODE=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"
"""

REPOSITORY = {
    "calc.py": "def add(a, b):\n    return a - b\n",
    TEST_FILE: "from calc import add\n\ndef test_sub():\n    assert add(3, 0) == 3\n",
    "run_tests.py": """\
import importlib.util, sys
sys.path.insert(0, ".")
for path in sys.argv[1:]:
    spec = importlib.util.spec_from_file_location("tests", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name in [n for n in vars(module) if n.startswith("test_")]:
        try:
            getattr(module, name)()
            print(f"PASSED {path}::{name}")
        except AssertionError:
            print(f"FAILED {path}::{name} - AssertionError")
""",
}
"""The code before the fix, and a runner that prints what pytest's summary would."""


def swebench(**changes: Any) -> dict[str, Any]:
    return {
        "repo": "acme/calc",
        "instance_id": "acme__calc-1",
        "base_commit": "0" * 40,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts.\r\nIt should add – see `calc.py`.",
        "hints_text": None,
        "created_at": "2024-01-01T00:00:00Z",
        "version": "1.0",
        "FAIL_TO_PASS": json.dumps([FAILS]),
        "PASS_TO_PASS": json.dumps([PASSES]),
        "environment_setup_commit": "0" * 40,
        "difficulty": "<15 min fix",
        "image_assets": {"problem_statement": ["a.png"], "patch": [], "test_patch": None},
        **changes,
    }


def swesmith(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "acme__calc.abc123.func_op__x1",
        "repo": "swesmith/acme__calc.abc123",
        "patch": BREAK,
        "FAIL_TO_PASS": [FAILS],
        "PASS_TO_PASS": [PASSES],
        "created_at": "2025-01-01",
        "image_name": "swebench/swesmith.x86_64.acme_1776_calc.abc123",
        "base_commit": "1" * 40,
        "problem_statement": "add subtracts.",
        **changes,
    }


def r2egym(**changes: Any) -> dict[str, Any]:
    diffs = [
        {
            "header": {"file": {"path": "calc.py"}},
            "old_file_content": REPOSITORY["calc.py"],
            "new_file_content": "def add(a, b):\n    return a + b\n",
        },
        {"header": {"file": {"path": TEST_FILE}}, "new_file_content": "secret"},
    ]
    return {
        "docker_image": "namanjain12/calc_final:abc",
        "repo_name": "calc",
        "commit_hash": "abcdef0123456789",
        "parsed_commit_content": json.dumps({"file_diffs": diffs, "commit_message": "fix"}),
        "execution_result_content": "{}",
        "expected_output_json": json.dumps({"test_add": "PASSED", "T.test_old": "FAILED"}),
        "problem_statement": "Read this:\n[ISSUE]\nadd subtracts.\n[/ISSUE]\n",
        "relevant_files": ["calc.py"],
        "num_non_test_files": 1,
        "score": 0.25,
        **changes,
    }


SAMPLES = {"swebench": swebench, "swesmith": swesmith, "r2egym": r2egym}


def lines(file: Path, *rows: dict[str, Any]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def swebench_repo(root: Path) -> Path:
    task = root / "tasks" / "acme__calc-1"
    (task / "test_assets" / "tests").mkdir(parents=True)
    (task / "problem_assets").mkdir()
    (root / "sweb.yaml").write_text("# what is published\ndatasets: [acme/Calc]\nsplits: [test, dev]\n")
    (task / "task.yaml").write_text(
        "# by hand\ninstance_id: acme__calc-1\nrepo: acme/calc\nversion: '1.0'\nbase_commit: abc\n"
        "split: test\n"
        "image: swebench/sweb.eval.x86_64.acme_1776_calc-1:latest\nlog_parser: parse_log_pytest\n"
        "eval_type: pass_and_fail\ndatasets: [acme/Calc]\n"
    )
    (task / "tests.json").write_text(
        json.dumps({"FAIL_TO_PASS": [FAILS], "PASS_TO_PASS": [PASSES]}, indent=3)
    )
    (task / "problem_statement.md").write_bytes(b"add subtracts.\r\n")
    (task / "hints.md").write_text("Look at calc.py.\n")
    (task / "gold.patch").write_text(FIX)
    (task / "test.patch").write_text(TEST_PATCH)
    (task / "eval.sh").write_text(EVAL.format(patch=TEST_PATCH, file=TEST_FILE))
    (task / "Dockerfile").write_text("FROM ubuntu:22.04\n")
    (task / "test_assets" / "tests" / "expected.png").write_bytes(b"\x89PNG\x00")
    (task / "problem_assets" / "shot.png").write_bytes(b"\x89PNG\x01")
    return root


def terminal_bench(root: Path) -> Path:
    task = root / "hello-world"
    (task / "tests").mkdir(parents=True)
    (task / "task.yaml").write_text(
        "# a comment\ninstruction: |-\n  Create hello.txt with 'Hello'.\nauthor_name: A\n"
        "author_email: a@b.c\n"
        "difficulty: easy\ncategory: file-operations\ntags:\n  - files\nparser_name: pytest\n"
        "max_agent_timeout_sec: 360.0\nmax_test_timeout_sec: 30.0\nrun_tests_in_same_shell: false\n"
    )
    (task / "Dockerfile").write_text("FROM ubuntu:24.04\nWORKDIR /app\nCOPY data.txt .\n")
    (task / "data.txt").write_text("x\n")
    (task / "docker-compose.yaml").write_text("services: {client: {build: {dockerfile: Dockerfile}}}\n")
    (task / "solution.sh").write_text("#!/bin/bash\necho Hello > /app/hello.txt\n")
    (task / "solution.sh").chmod(0o755)
    (task / "run-tests.sh").write_text(
        '#!/bin/bash\ncd /app\n[ "$(cat hello.txt 2>/dev/null)" = Hello ] && word=PASSED || word=FAILED\n'
        'echo "$word $TEST_DIR/test_outputs.py::test_hello"\n'
    )
    (task / "tests" / "test_outputs.py").write_text("def test_hello():\n    ...\n")
    return root


HARBOR = """\
# the author's comment
schema_version = "{version}"
source = "somewhere"
artifacts = ["/app/out.txt", {{ source = "/app/a", exclude = ["*.tmp"] }}]
x_future = "kept"

[task]
name = "org/thing"
authors = [{{ name = "A", email = "a@b.c" }}]

[environment]
docker_image = "debian:12"   # pinned later
allow_internet = false
gpu_types = ["h200"]
mcp_servers = [{{ name = "m", transport = "stdio", command = "m" }}]
healthcheck = {{ command = "true", retries = 2 }}

[verifier]
timeout_sec = 60
collect = [{{ command = "true" }}]

[metadata]
difficulty = "hard"
"""


def harbor(root: Path, version: str) -> Path:
    folder = root / "thing"
    for name in ("tests", "solution", "environment"):
        (folder / name).mkdir(parents=True)
    (folder / "task.toml").write_text(HARBOR.format(version=version))
    (folder / "instruction.md").write_text("Do it.\n")
    (folder / "trajectory.json").write_text("{}")
    (folder / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    (folder / "environment" / "link").symlink_to("docker-compose.yaml")
    (folder / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    (folder / "tests" / "test.sh").chmod(0o755)
    (folder / "solution" / "solve.sh").write_text("#!/bin/bash\n")
    return root
