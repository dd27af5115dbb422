"""Tasks in the format of Harbor 1.4, of different shapes, as tests need them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

NO_NETWORK = '[environment]\nnetwork_mode = "no-network"\n'
APART = f'artifacts = ["/app"]\n{NO_NETWORK}[verifier]\nenvironment_mode = "separate"\n'
PYTEST = "/opt/miniconda3/envs/testbed/bin/python -m pytest -p no:cacheprovider"
REWARD = "if [ $? -eq 0 ]; then echo 1; else echo 0; fi >/logs/verifier/reward.txt\n"
SAYS_BYE = f'[ "$(cat greeting.txt)" = bye ]\n{REWARD}'

_CALCULATOR = {
    "environment/calculator.py": "def half(number):\n    return number // 2\n",
    "tests/test_half.py": (
        "import sys\n\nsys.path.insert(0, '/app')\nimport calculator\n\n\n"
        "def test_half():\n    assert calculator.half(3) == 1.5\n"
    ),
}
_SKIPPED = "import pytest\n\n\n@pytest.mark.skip\ndef test_a():\n    pass\n"
_PARTIAL = """\
version = "1.0"
[environment]
allow_internet = false
memory = "2G"
storage = "512M"
cpus = 1
[environment.env]
WHO = 'a "b" $c'
"""
_SHARES = """\
[ "$WHO" = 'a "b" $c' ] || exit 3
n=0
for file in a b; do [ -e $file ] && n=$((n + 1)); done
perl -e "print $n / 2" >/logs/verifier/reward.txt
"""


def write_task(
    place: Path,
    name: str,
    *,
    test: str | None = SAYS_BYE,
    solve: str | None = "echo bye >greeting.txt\n",
    toml: str = NO_NETWORK,
    dockerfile: str | None = "",
    instruction: str = "Write bye into greeting.txt.\n",
    files: Mapping[str, str] = {},
    base: str = "base",
) -> Path:
    """Write a task's directory. dockerfile: what follows FROM and WORKDIR, None for no Dockerfile."""
    directory = place / name
    texts = {"task.toml": toml, "instruction.md": instruction, **files}
    if dockerfile is not None:
        texts["environment/Dockerfile"] = f"FROM {base}\nWORKDIR /app\n{dockerfile}"
    for path, script in (("tests/test.sh", test), ("solution/solve.sh", solve)):
        if script is not None:
            texts[path] = f"#!/bin/bash\n{script}"
    for path, text in texts.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text)
    return directory


def perl_task(place: Path, name: str, base: str, **more: Any) -> Path:
    """Write a task whose tests run a program of the work tree, sum.pl."""
    return write_task(
        place,
        name,
        dockerfile="COPY sum.pl /app/\n",
        test=f"[ \"$(printf '1\\n2\\n' | perl sum.pl)\" = 3 ]\n{REWARD}",
        solve="sed -i 's/-=/+=/' sum.pl\n",
        instruction="sum.pl must add up its input.\n",
        files={"environment/sum.pl": "my $sum = 0;\n$sum -= $_ for <>;\nprint $sum;\n"},
        base=base,
        **more,
    )


def steps_task(**more: Any) -> dict[str, Any]:
    """Return what a task with two steps has: the first has tests and a solution of its own."""
    steps = '[[steps]]\nname = "one"\nmin_reward = 0.5\n[steps.verifier]\ntimeout_sec = 90.0\n[[steps]]\nname = "two"\n'
    says_hi = f'[ "$(cat first.txt)" = hi ] && [ ! -e /solution ]\n{REWARD}'
    files = {
        "steps/one/instruction.md": "Write hi into first.txt.\n",
        "steps/one/tests/test.sh": f"#!/bin/bash\n{says_hi}",
        "steps/one/solution/solve.sh": "#!/bin/bash\necho hi >first.txt\n",
        "steps/two/instruction.md": "Write bye into greeting.txt.\n",
    }
    return {"toml": f"{NO_NETWORK}{steps}", "files": files, "test": f"[ -e first.txt ] || exit 1\n{SAYS_BYE}", **more}


def write_tasks(place: Path, base: str) -> dict[str, str]:
    """Write twelve tasks on a base image with git, perl and pytest; return what admission says of each, or why not."""

    def add(name: str, **what: Any) -> None:
        write_task(place, name, base=base, **what)

    half = {"test": f"{PYTEST} /tests/test_half.py\n{REWARD}", "solve": "sed -i 's|//|/|' calculator.py\n"}
    commit = "RUN git init -q . && git add . && git -c user.name=t -c user.email=t@example.com commit -qm x\n"
    separate = f"{APART}timeout_sec = 120.0\n"
    named = '[task]\nname = "made/shell"\n[metadata]\ndifficulty = "easy"\n'
    say = "half(3) must be 1.5.\n"
    add("plain/shell", toml=f'schema_version = "1.4"\n{named}{NO_NETWORK}')
    add(
        "python/separate",
        toml=separate,
        dockerfile=f"COPY calculator.py /app/\n{commit}",
        instruction=say,
        files=_CALCULATOR,
        **half,
    )
    add(
        "python/shared",
        dockerfile="COPY calculator.py /app/\n",
        instruction=f"<!-- canary 123 -->\n\n{say}",
        files=_CALCULATOR,
        **half,
    )
    perl_task(place, "perl", base)
    add("partial", toml=_PARTIAL, test=_SHARES, solve="touch a b\n", instruction="Make the files a and b.\n")
    keys = """printf '{"reward": %s, "style": 0.25}' $r >/logs/verifier/reward.json\n"""
    add("keys", test=f"[ -e greeting.txt ] && r=1 || r=0\n{keys}")
    add("given", dockerfile=None, toml=f'{NO_NETWORK}docker_image = "{base}"\nworkdir = "/srv/work"\n')
    add("broken", test="exit 1\n")
    skipped = f"{PYTEST} -q /tests/test_skipped.py\n[ -e greeting.txt ]\n{REWARD}"
    add("skipped", test=skipped, files={"tests/test_skipped.py": _SKIPPED})
    add("network", toml='[environment]\nnetwork_mode = "public"\n')
    add("steps", **steps_task())
    staged = {"steps/one/instruction.md": "Do.", "steps/one/workdir/setup.sh": "true"}
    add("staged", toml=f'{NO_NETWORK}[[steps]]\nname = "one"\n', files=staged)
    return {
        **dict.fromkeys(("made__shell", "separate", "shared", "perl", "partial", "keys", "given", "steps"), "pass"),
        **dict.fromkeys(("broken", "skipped"), "broken"),
        **dict.fromkeys(("network", "staged"), "unsupported"),
    }
