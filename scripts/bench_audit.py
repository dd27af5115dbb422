"""This program measures how fast the audit reads.

    python scripts/bench_audit.py RUN --episodes 10000

It writes a run of that many episodes, copies of RUN's under other names, and times ``python -m rollout.audit`` on it.
"""

import itertools
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec

from rollout import program
from rollout.records import Reader, RecordWriter


def main() -> int:
    """Print episodes, replies, tokens and seconds; return the audit's exit status."""
    options = program.parser("python scripts/bench_audit.py", __doc__)
    options.add_argument("run", type=Path, help="a run directory")
    options.add_argument("--episodes", type=int, default=10_000)
    args = options.parse_args()
    records = list(Reader(args.run))
    with tempfile.TemporaryDirectory() as directory:
        writer = RecordWriter(Path(directory, "episodes"), "copies")
        for number, record in zip(range(args.episodes), itertools.cycle(records), strict=False):
            writer.append(msgspec.structs.replace(record, episode=f"{number}-{record.episode}"))
        writer.close()
        size = writer.path.stat().st_size
        began = time.monotonic()
        code = subprocess.run([sys.executable, "-m", "rollout.audit", directory]).returncode
        seconds = time.monotonic() - began
    print(
        f"{args.episodes} episodes, {size / 1e6:.0f} MB: {seconds:.1f} s, {1e3 * seconds / args.episodes:.2f} ms each"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
