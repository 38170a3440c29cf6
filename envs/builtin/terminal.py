"""`terminal`: chores in a shell, as Harbor packages whose `tests/test.sh` writes the reward.

    env:terminal                       generated: files to sum, rename, filter, weigh, make executable
    env:terminal?suite=path/to/tasks   anybody's Harbor packages, terminal-bench's among them

Every task lives in a sandbox of the run's backend and is judged in a fresh one, like any package. What the
policy leaves is compared with `/tests/expected.txt` there; a link that leads out of the workdir is not an
answer. Held-out tasks are those whose content hashes into the held-out share, whatever the seed.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.builtin.packages import PackagedEnvironment, write_drawn
from envs.environment import split_of
from envs.tasks import package

WORKDIR = "/app"

TEST_SH = """\
#!/bin/bash
# Compares what was asked for with expected.txt. Only files inside the workdir count.
set -u
cd WORKDIR || exit 1
own() {  # a path without links, inside the workdir
  [ -f "$1" ] && [ "$(realpath -e -- "$1")" = "WORKDIR/$1" ]
}
seen() {
SEEN
}
reward=0
if [ "$(seen 2>/dev/null)" = "$(cat /tests/expected.txt)" ]; then reward=1; fi
echo "{\\"reward\\": $reward}" > /logs/verifier/reward.json
"""
ANSWER = "  own answer.txt && head -c 65536 answer.txt"
"""What most chores leave: a file with the answer."""

_WORDS = (
    "amber",
    "birch",
    "coral",
    "delta",
    "ember",
    "flint",
    "grove",
    "hazel",
    "ivory",
    "lotus",
    "maple",
    "onyx",
)
_REGIONS = ("north", "south", "east", "west")
_LEVELS = ("INFO", "WARN", "ERROR", "DEBUG")


@dataclass(frozen=True, slots=True, kw_only=True)
class Chore:
    """One task before it is written."""

    family: str
    instruction: str
    files: Mapping[str, str]
    solution: str
    seen: str
    """Shell commands that print what is compared."""
    expected: str

    def content(self) -> bytes:
        """What makes it this chore."""
        return "\0".join((self.instruction, *itertools.chain(*sorted(self.files.items())))).encode()


def _sum(rng: random.Random) -> Chore:
    rows = [
        (rng.choice(_WORDS), rng.choice(_REGIONS), rng.randint(1, 500)) for _ in range(rng.randint(8, 30))
    ]
    region = rng.choice(_REGIONS)
    total = sum(amount for _, where, amount in rows if where == region)
    table = "name,region,amount\n" + "".join(f"{name},{where},{amount}\n" for name, where, amount in rows)
    return Chore(
        family="sum",
        instruction=f"sales.csv has the columns name, region and amount. Write the sum of all amounts of the"
        f" region {region} into answer.txt: only the number.\n",
        files={"sales.csv": table},
        solution=f"awk -F, '$2 == \"{region}\" {{ t += $3 }} END {{ print t + 0 }}' sales.csv > answer.txt",
        seen=ANSWER,
        expected=f"{total}\n",
    )


def _filter(rng: random.Random) -> Chore:
    lines = [
        f"{rng.choice(_LEVELS)} {rng.choice(_WORDS)} {rng.choice(_WORDS)} {rng.randint(1, 9)}"
        for _ in range(rng.randint(15, 40))
    ]
    level = rng.choice(_LEVELS)
    kept = sorted({line for line in lines if line.startswith(level + " ")})
    return Chore(
        family="filter",
        instruction=f"Write the lines of server.log that begin with {level} into answer.txt, each once, in"
        " the order of `LC_ALL=C sort`.\n",
        files={"server.log": "".join(line + "\n" for line in lines)},
        solution=f"grep '^{level} ' server.log | LC_ALL=C sort -u > answer.txt || true",
        seen=ANSWER,
        expected="".join(line + "\n" for line in kept),
    )


def _rename(rng: random.Random) -> Chore:
    names = rng.sample(_WORDS, rng.randint(4, 8))
    old, new = rng.sample(("txt", "md", "log", "dat"), 2)
    other = rng.choice([end for end in ("cfg", "ini", "tsv") if end not in (old, new)])
    files = {f"notes/{name}.{old}": f"{name} {rng.randint(0, 9999)}\n" for name in names[2:]}
    files |= {f"notes/{name}.{other}": f"{name} stays {rng.randint(0, 9999)}\n" for name in names[:2]}
    after = {
        path.removesuffix(f".{old}") + (f".{new}" if path.endswith(f".{old}") else ""): text
        for path, text in files.items()
    }
    listing = sorted(f"{hashlib.sha256(text.encode()).hexdigest()}  {path}" for path, text in after.items())
    return Chore(
        family="rename",
        instruction=f"In the folder notes, give every file that ends in .{old} the ending .{new} instead."
        " Leave the other files and all contents as they are.\n",
        files=files,
        solution=f'for f in notes/*.{old}; do mv "$f" "${{f%.{old}}}.{new}"; done',
        seen="  find notes -type f -print0 | xargs -0 sha256sum | LC_ALL=C sort\n"
        "  find notes ! -type f ! -type d",
        expected="".join(line + "\n" for line in listing),
    )


def _largest(rng: random.Random) -> Chore:
    sizes = rng.sample(range(20, 900), rng.randint(5, 9))
    files = {
        f"data/{rng.choice(_WORDS)}/{name}.bin": "x" * size
        for name, size in zip(rng.sample(_WORDS, len(sizes)), sizes, strict=True)
    }
    biggest = max(files, key=lambda path: len(files[path]))
    return Chore(
        family="largest",
        instruction="Write the path of the largest file anywhere below data (like data/a/b.bin) into"
        " answer.txt.\n",
        files=files,
        solution="find data -type f -printf '%s %p\\n' | sort -n | tail -n 1 | cut -d' ' -f2 > answer.txt",
        seen=ANSWER,
        expected=f"{biggest}\n",
    )


def _executable(rng: random.Random) -> Chore:
    names = rng.sample(_WORDS, rng.randint(5, 8))
    word = rng.choice([each for each in _WORDS if each not in names])
    chosen = names[: rng.randint(2, len(names) - 1)]
    files = {
        f"bin/{name}": f"echo {name} {rng.randint(0, 99)}\n" + (f"# {word}\n" if name in chosen else "")
        for name in names
    }
    listing = sorted(f"{'x' if name in chosen else '-'} bin/{name}" for name in names)
    return Chore(
        family="executable",
        instruction=f"Make every file in bin that has the word {word} in it executable for its owner, and no"
        " other file.\n",
        files=files,
        solution=f"chmod u+x $(grep -l {word} bin/*)",
        seen='  for f in bin/*; do\n    own "$f" || continue\n'
        '    case $(stat -c %A "$f") in -??x*) echo "x $f" ;; *) echo "- $f" ;; esac\n'
        "  done | LC_ALL=C sort",
        expected="".join(line + "\n" for line in listing),
    )


FAMILIES: tuple[Callable[[random.Random], Chore], ...] = (_sum, _filter, _rename, _largest, _executable)


def chores(rng: random.Random) -> Iterator[Chore]:
    """Chores of all families, without end. The modes of generated files differ from what is asked for."""
    while True:
        yield rng.choice(FAMILIES)(rng)


def _write(folder: Path, name: str, chore: Chore) -> Path:
    config = {
        "schema_version": "1.4",
        "task": {"name": f"terminal/{name}", "description": f"A chore in a shell: {chore.family}."},
        "environment": {
            "network_mode": "no-network",
            "cpus": 1,
            "memory_mb": 256,
            "storage_mb": 16,
            "workdir": WORKDIR,
        },
        "agent": {"timeout_sec": 300},
        "verifier": {"timeout_sec": 20, "environment_mode": "separate"},
        "metadata": {
            "agentrl": {
                "split": str(split_of(chore.content())),
                "tools": ["bash", "read_file", "submit"],
                "max_turns": 12,
                "exec_timeout_s": 10,
                "observation_bytes": 4096,
                "pids_limit": 32,
                "grader": "script",
                "family": chore.family,
            }
        },
    }
    return package.write_task(
        folder,
        config=config,
        instruction=chore.instruction,
        environment=chore.files,
        tests={
            "test.sh": TEST_SH.replace("SEEN", chore.seen).replace("WORKDIR", WORKDIR),
            "expected.txt": chore.expected,
        },
        solution=f"#!/bin/bash\nset -eu\n{chore.solution}\n",
    )


def generate(out: Path, *, train: int, heldout: int, seed: int) -> tuple[Path, ...]:
    """Write packages, training tasks first; the same arguments give the same bytes. No chore twice."""
    return write_drawn(
        chores(random.Random(f"terminal/{seed}")),
        name="terminal",
        content=Chore.content,
        write=_write,
        out=out,
        train=train,
        heldout=heldout,
        seed=seed,
    )


ENVIRONMENT = PackagedEnvironment(
    name="terminal",
    summary="Do a chore in a shell; the package's own script judges it in a fresh sandbox.",
    generate=generate,
)
