"""The screen that a program shows its user: events, what is being done now, and what to do next.

    with Screen() as screen:
        screen.say("an event")                                         # a line that stays
        screen.show("gradings", done=3, total=60, note="1 flaky")      # what is being done now
        screen.next(("report", "less OUT.md"))                         # useful commands, at the end

On a terminal, what is being done now is a bar below the events that is redrawn in place. Elsewhere (a pipe, the log of
a batch job) it is a line at most every ``every_s`` seconds, and only when something is counted. All methods may be
called from any thread.
"""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from rollout import program


class _Console(Console):
    """A console whose reader is gone writes to nowhere, so that whoever prints goes on. Escape codes are its own."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else program.shown(text), style, control)

    def on_broken_pipe(self) -> None:
        program.to_nowhere(self.file.fileno())


class Screen:
    """A screen writes to the user's terminal, even while stdout and stderr of this process go to a log file."""

    def __init__(self, every_s: float = 30.0) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        self._stderr: int | None = None  # while redirected
        self._began = time.monotonic()
        self._console = _Console(file=self._out, highlight=False)
        # With FORCE_COLOR rich takes a pipe for a terminal: colours are wanted then, cursor movements are not.
        self.is_terminal = self._out.isatty() and not self._console.is_dumb_terminal
        self._every_s = every_s
        self._lock = threading.RLock()
        self._live: Live | None = None
        self._shown = ""  # the text beside the bar
        self._said = self._began  # when a line was last written to a pipe
        self._note = Text()
        self._bar = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        )
        self._clock = Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        self._doing = self._clock  # the bar or the clock, whichever is shown; each has one task
        for progress in (self._bar, self._clock):
            progress.add_task("")

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def fileno(self) -> int:
        """Return the file descriptor of the user's terminal."""
        return self._out.fileno()

    def say(self, text: str) -> None:
        """Print an event with the seconds since the start."""
        self.print(f"[{time.monotonic() - self._began:6.1f} s] {text}")

    def print(self, renderable: RenderableType) -> None:
        """Print a text as it is, or one of rich's renderables."""
        # Text is not wrapped, because a folded path cannot be copied, and "[...]" in it is no markup.
        with self._lock:
            if isinstance(renderable, str):
                self._console.print(renderable, soft_wrap=True, markup=False, emoji=False)
            else:
                self._console.print(renderable)

    def show(self, what: str, done: int | None = None, total: int | None = None, note: str = "") -> None:
        """Show what is being done now, until the next call or ``clear``.

        ``done`` and ``total`` count how far it is; None if that is not known. ``note`` is shown on a second line.
        """
        with self._lock:
            if self.is_terminal:
                self._draw(what, done, total, note)
            else:
                self._tell(what, done, total, note)

    def clear(self) -> None:
        """Remove what is shown as being done and leave the terminal as it was."""
        with self._lock:
            if self._live is not None:
                self._live.stop()
                self._live = None
            self._shown = ""

    def next(self, *commands: tuple[str, str]) -> None:
        """Print commands or paths that are useful next, each after its label."""
        self.clear()
        width = max((len(label) for label, _ in commands), default=0)
        for label, command in commands:
            self.print(f"{label:<{width}}  {command}")

    def redirect(self, log: Path) -> None:
        """Send stdout and stderr of this process and its children to ``log``; our own lines stay on the screen."""
        sys.stdout.flush()
        sys.stderr.flush()
        self._stderr = os.dup(2)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)

    def restore(self) -> None:
        """Undo ``redirect`` and remove what is shown."""
        self.clear()
        if self._stderr is None:
            return
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(self._out.fileno(), 1)
        os.dup2(self._stderr, 2)
        os.close(self._stderr)
        self._stderr = None

    def _draw(self, what: str, done: int | None, total: int | None, note: str) -> None:
        self._doing = self._bar if total else self._clock
        task = self._doing.tasks[0]
        if what != self._shown:
            self._shown = what
            self._doing.reset(task.id)  # its clock
        self._doing.update(task.id, description=what, completed=done or 0, total=total)
        self._note = Text(f"  {note}", style="dim", no_wrap=True, overflow="ellipsis")
        if self._live is None:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=4,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start()
            self._console.show_cursor(True)  # a process that is killed could not bring it back

    def _render(self) -> RenderableType:
        return Group(self._doing, self._note) if self._note.plain.strip() else self._doing

    def _tell(self, what: str, done: int | None, total: int | None, note: str) -> None:
        now = time.monotonic()
        if what != self._shown:
            self._shown, self._said = what, now
        if done is None or now - self._said < self._every_s:
            return
        self._said = now
        self.say(f"{what} {done}{f'/{total}' if total else ''}{f'  {note}' if note else ''}")


def ended(command: str, work: Callable[[Screen], int], resumable: bool = True) -> int:
    """Do the work of a command and return its exit status; what ends it is said in one line.

    resumable: the same command goes on where it was interrupted, which is said.
    """
    screen = Screen()
    try:
        return work(screen)
    except (OSError, ValueError) as error:
        screen.clear()
        print(f"{command}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, OSError) or isinstance(error.__cause__, OSError) else 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        if resumable:
            screen.next(("continue", this_command()))
        return 130


def this_command() -> str:
    """Return the command that started this process, quoted for a shell."""
    return shlex.join(sys.orig_argv)


def to_go(seconds: float) -> str:
    """Return a phrase for how long something will still take."""
    return f"about {seconds / 60:.0f} min to go" if seconds >= 90 else f"about {seconds:.0f} s to go"
