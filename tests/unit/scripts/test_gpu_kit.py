"""These tests are about what goes to a GPU machine without a network: parts, an environment, keys of its training."""

import random
import struct
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rl.checks import check_values
from rl.config.compose import compose

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.fixture
def packer() -> ModuleType:
    import gpu_pack

    return gpu_pack


def test_archives_are_unpacked_as_soon_as_their_parts_are_there(packer: ModuleType, tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(5000)
    one, other = tmp_path / "one", tmp_path / "other.bin"
    (one / "deep").mkdir(parents=True)
    (one / "deep" / "file").write_bytes(noise)
    (one / "deep" / "file").chmod(0o755)
    other.write_bytes(noise[::-1])
    packer.pack(tmp_path / "parts", {"one": one, "other": other}, 1000)
    arriving, out = tmp_path / "arriving", tmp_path / "out"
    arriving.mkdir()
    (arriving / "index.json").write_bytes((tmp_path / "parts" / "index.json").read_bytes())
    parts = sorted((tmp_path / "parts").glob("p*"))
    assert len(parts) > 8
    unpacked = []
    for number, part in enumerate(parts):
        (arriving / part.name).write_bytes(part.read_bytes())
        if number == 3:  # a part that the way has changed
            (arriving / part.name).write_bytes(part.read_bytes()[::-1])
            with pytest.raises(SystemExit, match=r"part 3 \(p03\) has other bytes"):
                packer.unpack(arriving, out)
            assert not (arriving / part.name).exists()
            (arriving / part.name).write_bytes(part.read_bytes())
        left = packer.unpack(arriving, out)
        assert bool(left) == (number < len(parts) - 1)
        unpacked.append(sorted(path.name for path in out.glob("[a-z]*")))
    assert unpacked[0] == [] and ["one"] in unpacked and unpacked[-1] == ["one", "other"]
    assert (out / "one" / "deep" / "file").read_bytes() == noise
    assert (out / "one" / "deep" / "file").stat().st_mode & 0o777 == 0o755
    assert (out / "other" / "other.bin").read_bytes() == noise[::-1]


def fat_binary(*entries: tuple[int, bytes]) -> bytes:
    """Return a fat binary of (architecture, code)."""
    body = b"".join(
        struct.pack("<HHIQ", 2, 1, 64, len(code)).ljust(28, b"\1") + struct.pack("<I", arch) + bytes(32) + code
        for arch, code in entries
    )
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def test_a_library_keeps_the_code_of_one_architecture(packer: ModuleType) -> None:
    library = b"ELF" + fat_binary((80, b"eighty"), (90, b"ninety"), (100, b"hundred")) + b"more"
    library += struct.pack("<I", 0xBA55ED50) + b"only the number"
    kept = packer.only_sm_90(library)
    assert len(kept) == len(library) and b"ninety" in kept and kept.endswith(b"only the number")
    assert b"eighty" not in kept and b"hundred" not in kept


def test_the_keys_of_the_expedition_are_right(tmp_path: Path) -> None:
    from gpu_expedition import Expedition

    (tmp_path / "log").mkdir()
    check_values(compose(Expedition(tmp_path).training()[2:]))


def test_the_expedition_goes_on_with_what_has_no_result(tmp_path: Path) -> None:
    from gpu_expedition import Expedition

    calls = []

    def fails() -> None:
        calls.append("fails")
        raise ValueError("no GPU")

    first = Expedition(tmp_path)
    assert first.step("good", lambda: calls.append("good")) and not first.step("bad", fails)
    second = Expedition(tmp_path)
    assert second.step("good", lambda: calls.append("again")) and not second.step("bad", fails)
    assert calls == ["good", "fails", "fails"]
    assert second.results["bad"]["error"] == "ValueError: no GPU"


@pytest.mark.parametrize("fails", ["", "grpo"])
def test_the_warm_policy_is_evaluated_also_if_grpo_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    from gpu_expedition import Expedition

    made = []

    def step(self: Expedition, name: str, work: object) -> bool:
        made.append(name)
        return name != fails

    monkeypatch.setattr(Expedition, "step", step)
    Expedition(tmp_path).run()
    assert {"evaluate_warm", "audit", "report"} <= set(made)
    assert ("evaluate_grpo" in made, "compare" in made, "rate" in made) == 3 * (not fails,)


def test_training_is_told_once_to_stop(tmp_path: Path) -> None:
    """rl.train ends without a checkpoint at a second signal; the time may be moved while it runs."""
    from gpu_expedition import Expedition

    program = "import signal, time\nsignal.signal(signal.SIGUSR1, lambda *_: print('told', flush=True))\n"
    program += "print('ready', flush=True)\nsignal.pause()\ntime.sleep(2.5)\nprint('saved')"
    expedition = Expedition(tmp_path)
    log = tmp_path / "log" / "toy.log"
    asked = []

    def until() -> float:
        asked.append(log.read_text())
        return 0 if "ready" in asked[-1] else sys.maxsize

    assert expedition.program("toy", "-c", program, until=until).split() == ["ready", "told", "saved"]
