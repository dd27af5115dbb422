"""The SLURM job in which this process runs: its number, its end, whether it was requeued.

Outside of one nothing is known.
"""

import os
import subprocess
import time

ANSWER_S = 5  # for the controller to answer


def job_end() -> float | None:
    """Return when the job's time is up (seconds since the epoch); None if that is not known.

    The controller is asked first, because a time limit can be changed; if it does not answer, SLURM's variable counts,
    which newer versions set at the job's start.
    """
    if not job():
        return None
    try:
        command = ["squeue", "--noheader", f"--jobs={job()}", "--format=%e"]
        said = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=True).stdout
        # An array's job number may list others; tasks of their own have numbers of their own.
        return time.mktime(time.strptime(said.split()[0], "%Y-%m-%dT%H:%M:%S"))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):  # not here, no answer, "N/A", nothing
        end = os.environ.get("SLURM_JOB_END_TIME", "")
        return float(end) if end.isdigit() else None


def job() -> str:
    """Return the job's number, "" outside of one."""
    return os.environ.get("SLURM_JOB_ID", "")


def is_requeued() -> bool:
    """Tell whether SLURM started this job again by itself or after ``scontrol requeue``."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
