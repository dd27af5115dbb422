"""Make parts that bring everything to a GPU machine without a network, and unpack them there: docs/planning.md.

    python scripts/gpu_pack.py strip SITE-PACKAGES OUT      # a copy of an environment that is small enough to carry
    python scripts/gpu_pack.py pack OUT NAME=PATH ...       # on a machine with a network
    python3 scripts/gpu_pack.py unpack PARTS DIR            # on the GPU machine: whatever is complete so far

``pack`` compresses each PATH (a directory or a file) into an archive NAME and cuts all archives, one after the other,
into OUT/p00, OUT/p01, ... of ``--part-mb``; OUT/index.json has the sum of each part. An archive that is in
OUT/archives already is not made again. ``unpack`` needs Python's standard library only. It checks the parts that are
there, refuses a wrong one by its number, and makes DIR/NAME of each archive whose parts are all there.

``strip`` copies an environment without what a Hopper GPU does not need for training a text model: machine code of other
GPUs in fat binaries (the size stays and the zeros compress away), Java, test data, static libraries.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import lzma
import re
import shutil
import struct
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SM_90 = 90
_FAT_BINARY = struct.pack("<I", 0xBA55ED50)
"""The magic number of a fat binary (CUDA's fatbinary.h): a head, then entries of PTX (kind 1) or machine code (2)."""
LEFT_OUT = (
    r"/__pycache__(/|$)",
    r"^given\.pth$",
    r"\.a$",
    r"^vllm/(_flashmla|_qutlass|_rust_tool_parser)\S*\.so$",
    r"^vllm/(vllm-rs|third_party/deep_gemm|third_party/fmha_sm100)(/|$)",
    r"^vllm/vllm_flash_attn/_vllm_fa2_C",
    r"^ray/(jars|rllib|serve|tune|llm|dashboard/client|core/src/ray/cpp|cpp)(/|$)",
    r"^(wandb/bin|mistral_common/data|pycountry/locales|cudnn|claude_agent_sdk/_bundled)(/|$)",
    r"^(nvtx|fastsafetensors|libcst|virtualenv|nacl)(/|$)",
    r"^zstandard/_cffi",
)
"""Paths, below site-packages, that ``strip`` leaves out."""


def strip(source: Path, out: Path) -> None:
    """Copy an environment's packages without ``LEFT_OUT``; vLLM's libraries keep only Hopper's machine code."""
    left_out = [re.compile(pattern) for pattern in LEFT_OUT]
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source).as_posix()
        if path.is_dir() or any(pattern.search(name) for pattern in left_out):
            continue
        target = out / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if name.startswith("vllm/") and path.suffix == ".so" and path.stat().st_size > 2**20:
            target.write_bytes(only_sm_90(path.read_bytes()))
            target.chmod(0o755)
        else:
            shutil.copy2(path, target, follow_symlinks=False)


def only_sm_90(library: bytes) -> bytes:
    """Return a CUDA library in which the code for other architectures is zeros; PTX is that, too."""
    data, at = bytearray(library), 0
    while (at := data.find(_FAT_BINARY, at)) >= 0:
        _, _, head, size = struct.unpack_from("<IHHQ", data, at)
        if head != 16 or at + head + size > len(data):  # the number by chance
            at += 4
            continue
        entry, end = at + head, at + head + size
        while entry + 64 <= end:
            _, _, length, payload = struct.unpack_from("<HHIQ", data, entry)
            if not 32 <= length <= 4096 or not payload or entry + length + payload > end:
                break
            if struct.unpack_from("<I", data, entry + 28)[0] != SM_90:
                data[entry + length : entry + length + payload] = bytes(payload)
            entry += length + payload
        at = end
    return bytes(data)


def pack(out: Path, sources: dict[str, Path], part_bytes: int) -> None:
    """Write the archives, the parts and the index to ``out``."""
    archives = out / "archives"
    archives.mkdir(parents=True, exist_ok=True)
    index: dict[str, Any] = {"archives": [], "parts": []}
    for name, path in sources.items():
        archive = archives / f"{name}.tar.xz"
        if not archive.exists():
            _compress(path, archive)
        index["archives"].append({"name": name, "bytes": archive.stat().st_size})
    stream = _joined([archives / f"{name}.tar.xz" for name in sources], part_bytes)
    for number, part in enumerate(stream):
        (out / f"p{number:02d}").write_bytes(part)
        index["parts"].append({"bytes": len(part), "sha256": hashlib.sha256(part).hexdigest()})
    (out / "index.json").write_text(json.dumps(index))
    for one in index["archives"]:
        print(f"{one['name']}: {one['bytes'] / 1e6:.1f} MB")
    print(f"{len(index['parts'])} parts of at most {part_bytes / 1e6:.1f} MB")


def _compress(path: Path, archive: Path) -> None:
    building = archive.with_name(f".{archive.name}")
    members = ["-C", str(path), "."] if path.is_dir() else ["-C", str(path.parent), path.name]
    level = ["xz", "-c", "-T0", "--x86", "--lzma2=preset=6,dict=64MiB"]
    with building.open("wb") as file:
        tar = subprocess.Popen(["tar", "c", "--sort=name", "--owner=0", "--group=0", *members], stdout=subprocess.PIPE)
        subprocess.run(level, stdin=tar.stdout, stdout=file, check=True)
        if tar.wait():
            raise SystemExit(f"tar of {path} failed")
    building.rename(archive)


def _joined(files: list[Path], size: int) -> Iterator[bytes]:
    """Yield the bytes of files, one after the other, in pieces of ``size``."""
    piece = bytearray()
    for path in files:
        with path.open("rb") as file:
            while got := file.read(size - len(piece)):
                piece += got
                if len(piece) == size:
                    yield bytes(piece)
                    piece.clear()
    if piece:
        yield bytes(piece)


def unpack(parts: Path, out: Path) -> int:
    """Unpack each archive whose parts are there and that is not unpacked yet; return 1 while parts are missing."""
    index = json.loads((parts / "index.json").read_text())
    sizes = [part["bytes"] for part in index["parts"]]
    there = {number for number in range(len(sizes)) if (parts / f"p{number:02d}").exists()}
    for number in sorted(there):
        checked, path = parts / f".checked{number:02d}", parts / f"p{number:02d}"
        if not checked.exists():
            if hashlib.sha256(path.read_bytes()).hexdigest() != index["parts"][number]["sha256"]:
                path.unlink()
                raise SystemExit(f"part {number} (p{number:02d}) has other bytes and was removed; send it again")
            checked.touch()
    begin = 0
    for archive in index["archives"]:
        end = begin + archive["bytes"]
        needed = range(begin // sizes[0], -(-end // sizes[0]))
        target = out / archive["name"]
        if not target.exists() and there.issuperset(needed):
            building = target.with_name(f".{target.name}")
            shutil.rmtree(building, ignore_errors=True)
            building.mkdir(parents=True)
            raw = io.BufferedReader(_Slice(parts, sizes[0], begin, end), 2**20)
            with lzma.open(raw) as plain, tarfile.open(fileobj=plain, mode="r|") as tar:
                tar.extractall(building, filter="tar")
            building.rename(target)
            print(f"unpacked {archive['name']}", flush=True)
        elif not target.exists():
            print(f"{archive['name']}: parts {sorted(set(needed) - there)} are missing", flush=True)
        begin = end
    return int(len(there) < len(sizes))


class _Slice(io.RawIOBase):
    """Bytes ``begin`` to ``end`` of the parts' stream, as a file."""

    def __init__(self, parts: Path, size: int, begin: int, end: int) -> None:
        self.parts, self.size, self.at, self.end = parts, size, begin, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        number, offset = divmod(self.at, self.size)
        count = min(len(buffer), self.end - self.at, self.size - offset)
        if count <= 0:
            return 0
        with (self.parts / f"p{number:02d}").open("rb") as file:
            file.seek(offset)
            got = file.readinto(memoryview(buffer)[:count])
        self.at += got
        return got


def main() -> int:
    """Run the command and return its exit status."""
    about, plain = (__doc__ or "").replace("`", ""), argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python scripts/gpu_pack.py", description=about, formatter_class=plain)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("pack", help="make the parts")
    one.add_argument("out", type=Path)
    one.add_argument("sources", nargs="+", metavar="NAME=PATH")
    one.add_argument("--part-mb", type=float, default=56, help="megabytes of a part (default: 56)")
    stripping = ("strip", "source", "copy an environment without what is not needed")
    for name, place, what in (stripping, ("unpack", "parts", "unpack what is complete")):
        one = commands.add_parser(name, help=what)
        one.add_argument(place, type=Path)
        one.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.command == "pack":
        sources = {name: Path(path) for name, _, path in (text.partition("=") for text in args.sources)}
        pack(args.out, sources, int(args.part_mb * 1e6))
    elif args.command == "strip":
        strip(args.source, args.out)
    else:
        return unpack(args.parts, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
