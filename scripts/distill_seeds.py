"""Show that a policy learns from a teacher alone: on-policy distillation for several seeds, one after the other.

    .venv/bin/python scripts/distill_seeds.py --seeds 1 2 3 --out outputs/distill-seeds.md [key=value ...]

The student is the quickstart's policy after its warm start, which is right in one of four episodes. The teacher is that
policy, fine-tuned on those episodes of the warm start that are right by chance. Both are made once, with seed 1; the
seeds are those of the student's training. The tests' rewards are not in its loss. What is finished is not done again,
and what was interrupted goes on. key=value: more of rl.train's command line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from measuring import ROOT, audited, finished, minutes, table

from rl.config.compose import compose
from rl.metrics.episodes import Line, read_jsonl
from rl.quickstart.prepare import prepare
from rl.run.screen import Screen
from rollout import program

STEPS = 8
COLUMNS = (
    "seed", "held-out before", "held-out after", "teacher", "resolved in each step", "nats apart", "minutes", "audit",
)  # fmt: skip


def python(*command: str) -> None:
    """Run ``python -m command``. Raises CalledProcessError."""
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True)


def make_teacher(student: Path, root: Path) -> Path:
    """Return the run that has fine-tuned the teacher; its evaluation is ``root/teacher``."""
    chosen = root / "chosen"
    if not chosen.exists():
        python("rl.data.select", str(student.parent), "--resolved", "--no-flags", "--out", str(chosen))
    command = ("rl.sft", "+experiment=quickstart", f"data=[{chosen}]", "trainer.logger=[]", f"run.root={root}")
    run = finished(root / "quickstart-sft", *command)
    python("rl.evaluate", f"policy={run}", "samples=2", f"out={root / 'teacher'}")
    return run


def train(seed: int, made: dict[str, object], teacher: Path, root: Path, more: list[str]) -> Path:
    """Return the directory of a student's finished run."""
    where = root / f"seed-{seed}"
    command = ["rl.train", "+experiment=quickstart", "+distill=on_policy", f"seed={seed}", f"run.root={where}"]
    command += ["prepare=null", "~quickstart", *(f"{key}={value}" for key, value in made.items())]
    command += [f"distillation.teacher_models.teacher_model.model_path={teacher / 'model'}"]
    command += ["ray_kwargs.ray_init.num_gpus=2", "trainer.logger=[]", f"trainer.total_training_steps={STEPS}", *more]
    return finished(where / "quickstart", *command)


def share(line: Line) -> str:
    return f"{line['val/resolve_rate']:.2f} ({line['val/resolved']:.0f} of {line['val/count']:.0f})"


def row(seed: int, run: Path, teacher: str) -> list[str]:
    lines = read_jsonl(run / "metrics.jsonl")
    before, *_, after = [share(line) for line in lines if "val/resolve_rate" in line]
    steps = [line for line in lines if "episode/resolve_rate" in line]
    resolved = " ".join(f"{line['episode/resolve_rate']:.2f}" for line in steps)
    apart = [f"{step['actor/distillation/abs_loss']:.3f}" for step in (steps[0], steps[-1])]
    return [str(seed), before, after, teacher, resolved, " to ".join(apart), f"{minutes(run):.1f}", audited(run)]


def main() -> None:
    options = program.parser("python scripts/distill_seeds.py", __doc__)
    options.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    options.add_argument("--root", type=Path, default=Path("outputs/distill-seeds"), help="where the runs are")
    options.add_argument("--out", type=Path, default=Path("outputs/distill-seeds.md"), help="the table")
    options.add_argument("more", nargs="*", metavar="key=value", help="more of rl.train's command line")
    args = options.parse_args()
    root = args.root.absolute()
    made = prepare(compose(["+experiment=quickstart", f"run.root={root}"]), Screen())
    teacher = make_teacher(Path(made["actor_rollout_ref.model.path"]), root)
    found = json.loads((root / "teacher" / "results.json").read_text())
    taught = f"{found['pass_at_1']['value']:.2f} ({found['resolved']} of {found['episodes']})"
    runs = {seed: train(seed, made, teacher, root, args.more) for seed in args.seeds}
    rows = table(COLUMNS, *(row(seed, run, taught) for seed, run in runs.items()))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(f"{rows}\n{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores\n")
    print(rows)


if __name__ == "__main__":
    main()
