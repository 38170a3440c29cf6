"""The Harbor contract (`tests/test.sh`, a reward file) and the hand-written suite, under isolation."""

import asyncio
from pathlib import Path

import pytest
from faulty_backend import KEY, admission_of, attempt, config

from agentrl.errors import SandboxError
from agentrl.types import Action, Task, Termination, Verdict
from envs.admission import admit_suite
from envs.sandbox.local import LocalBackend
from envs.session import Session
from envs.tasks import package

pytestmark = pytest.mark.sandbox

SUITE = Path(__file__).parents[2] / "tasks" / "handwritten"
JUDGE = 'if [ "$(cat answer 2>/dev/null)" = 42 ]; then r=1; else r=0; fi\n'


@pytest.fixture
def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    backend = LocalBackend(folder)
    try:
        backend.check()
    except SandboxError as error:
        pytest.skip(str(error))
    return folder


def script_task(folder: Path, script: str) -> Task:
    package.write_task(
        folder,
        config=config(grader="script", fail_to_pass=[], pass_to_pass=[], tools=["bash", "submit"]),
        instruction="Write 42 into the file answer.\n",
        environment={"README.md": "x\n"},
        tests={"test.sh": "#!/bin/bash\n" + script, "secret": "s3cret\n"},
        solution="#!/bin/bash\necho 42 > answer\n",
    )
    return package.load_task(folder)


def graded(state: Path, task: Task, *commands: str) -> Verdict:
    async def run() -> Verdict:
        backend = LocalBackend(state)
        try:
            record = await admission_of(task, backend)
            async with await Session.open(
                task, backend, session_id="agent", signing_key=KEY, admission=record
            ) as session:
                for number, command in enumerate(commands):
                    await session.call(Action(id=str(number), tool="bash", arguments={"command": command}))
                return await session.finalize(termination=Termination.FINISHED, fault=None)
        finally:
            await backend.close()

    return asyncio.run(run())


def test_a_reward_file_is_read_and_json_wins(state: Path, tmp_path: Path) -> None:
    text = script_task(tmp_path / "a", JUDGE + "echo $r > /logs/verifier/reward.txt\n")
    assert graded(state, text, "echo 42 > answer").reward == 1.0
    assert graded(state, text).reward == 0.0
    both = script_task(
        tmp_path / "b",
        f"{JUDGE}echo 7 > /logs/verifier/reward.txt\n"
        'echo "{\\"reward\\": 0.5, \\"style\\": $r}" > /logs/verifier/reward.json\n',
    )
    verdict = graded(state, both, "echo 42 > answer")
    assert (verdict.reward, verdict.components) == (0.5, {"reward": 0.5, "style": 1.0})


PLANTS = [
    "mkdir -p logs/verifier && echo 1 > logs/verifier/reward.txt; echo '{\"reward\": 1}' > reward.json",
    "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt; true",
    "(while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.01; done) &>/dev/null &",
    "mkdir -p /tests && echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; true",
]


@pytest.mark.parametrize("command", PLANTS)
def test_a_planted_reward_is_worth_nothing(state: Path, tmp_path: Path, command: str) -> None:
    """ENV-07: the verifier's sandbox is fresh, so neither files nor processes of the policy are there."""
    task = script_task(tmp_path / "t", JUDGE + "echo $r > /logs/verifier/reward.txt\n")
    assert graded(state, task, command).reward == 0.0


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("true\n", "no_reward"),
        ("exit 1\n", "script_failed"),
        ("echo 0 > /logs/verifier/reward.txt; exit 1\n", "script_failed"),
        ("echo nan > /logs/verifier/reward.txt\n", "reward_not_finite"),
        ("echo '{\"reward\": NaN}' > /logs/verifier/reward.json\n", "reward_not_finite"),
        ("echo '{\"reward\": true}' > /logs/verifier/reward.json\n", "reward_not_finite"),
        ('echo \'{"a": 1, "b": 1}\' > /logs/verifier/reward.json\n', "reward_file"),
        ("echo '[1]' > /logs/verifier/reward.json\n", "reward_file"),
        ("echo much > /logs/verifier/reward.txt\n", "reward_file"),
        ("echo 1 > /logs/verifier/reward.txt; setsid sleep 60 >/dev/null 2>&1 &\n", "script_leftovers"),
    ],
)
def test_a_verifier_that_could_not_judge_leaves_no_reward(
    state: Path, tmp_path: Path, script: str, code: str
) -> None:
    """ENV-10: a failed step before the tests is never a zero."""
    verdict = graded(state, script_task(tmp_path / "t", script), "echo 42 > answer")
    assert verdict.reward is None
    assert verdict.fault is not None
    assert (verdict.fault.owner, verdict.fault.code) == ("task", code)


def test_the_tests_are_not_in_the_policys_sandbox(state: Path, tmp_path: Path) -> None:
    script = "grep -q s3cret found && r=1 || r=0; echo $r > /logs/verifier/reward.txt\n"
    look = "cat /tests/secret > found; grep -rh s3cret /app /home /tmp /root /opt /etc >> found 2>/dev/null"
    assert graded(state, script_task(tmp_path / "t", script), look).reward == 0.0


def test_without_isolation_a_script_is_refused_not_scored(tmp_path: Path) -> None:
    task = script_task(tmp_path / "t", JUDGE + "echo $r > /logs/verifier/reward.txt\n")
    verdict = attempt(task)
    assert (verdict.reward, verdict.fault and verdict.fault.code) == (None, "needs_isolation")


def hostile(state: Path, folder: Path, code: str) -> Verdict:
    """The verdict on a `cart.py` whose `total` is right and that does something else on import."""
    package.write_task(
        folder,
        config=config(fail_to_pass=["test_a.py::test_a"], pass_to_pass=[]),
        instruction="x\n",
        environment={"cart.py": "total = 0\n"},
        tests={"test_a.py": "import cart\n\n\ndef test_a():\n    assert cart.total == 1\n"},
        solution="#!/bin/bash\n",
    )
    return graded(state, package.load_task(folder), f"cat > cart.py <<'PY'\n{code}total = 1\nPY")


def test_tested_code_can_not_end_the_program_that_tests_it(state: Path, tmp_path: Path) -> None:
    """Where the tests have a user of their own the kill is refused and scores 0; else nothing is scored."""
    verdict = hostile(state, tmp_path / "t", "import os\nos.kill(os.getppid(), 9)\n")
    one_user = verdict.fault is not None and verdict.fault.code == "verifier_killed"
    assert verdict.reward == 0.0 or (verdict.reward is None and one_user)


@pytest.mark.parametrize("path", ["fd/0", "fd/3", "mem", "environ"])
def test_tested_code_can_not_open_the_program_that_tests_it(state: Path, tmp_path: Path, path: str) -> None:
    opens = f"    os.open(f'/proc/{{os.getppid()}}/{path}', os.O_RDONLY)\n"
    look = f"import os\ntry:\n{opens}    raise SystemExit\nexcept PermissionError:\n    pass\n"
    assert hostile(state, tmp_path / "t", look).reward == 1.0


def test_the_hand_written_suite_is_admitted(state: Path) -> None:
    async def run() -> None:
        backend = LocalBackend(state)
        try:
            tasks = package.load_suite(SUITE)
            assert len(tasks) >= 12
            for admission in await admit_suite(tasks, backend, repeats=3):
                assert admission.valid, (admission.task_id, admission.reasons)
        finally:
            await backend.close()

    asyncio.run(run())
