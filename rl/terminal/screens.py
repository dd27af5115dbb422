"""This module shows lines as lists, one screen on top of the other. All are tables of rows with find and filters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, cast

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from rl.terminal import lines
from rl.terminal.lines import Decode, Entry, Row, shown
from rollout.audit import tokenizer_of
from rollout.records import CorruptRecordError, Record, record_at

_EACH = 500  # entries read between two looks at the screen


class Table(DataTable[Text]):
    """This table's footer says what enter does. Home and end go to the first and the last row, not column."""

    BINDINGS: ClassVar = [
        Binding("enter", "select_cursor", "Open"),
        Binding("home", "scroll_top", show=False),
        Binding("end", "scroll_bottom", show=False),
    ]


class Listing(Screen[None]):
    """A listing is a table of rows with a heading.

    ``make`` returns its rows, ``opens`` the screen that a row is about, or None. With ``filters``, words leave only the
    rows that have them, and the rows are made again while records are being read; without, words are searched for.
    """

    CSS = "DataTable { height: 1fr; } #heading { text-style: bold; }"
    BINDINGS: ClassVar = [
        Binding("slash", "find", "Find"),
        Binding("n", "step(1)", "Next", show=False),
        Binding("N", "step(-1)", "Previous", show=False),
        Binding("escape", "back", "Back"),
        Binding("r", "app.again", "Read again"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(
        self,
        heading: str,
        columns: Sequence[str],
        make: Callable[[], list[Row]],
        opens: Callable[[Any], Screen[None] | None] = lambda about: None,
        filters: bool = True,
    ) -> None:
        super().__init__()
        self._heading, self._columns, self._make, self._opens, self.narrows = heading, columns, make, opens, filters
        self._words: list[str] = []
        self.rows: list[Row] = []
        self.made = False

    def compose(self) -> ComposeResult:
        """Make the widgets."""
        yield Static(id="heading")
        yield Table(cursor_type="row", show_header=len(self._columns) > 1)
        yield Input(placeholder="words, turns>20, step=3" if self.narrows else "words")
        yield Footer()

    def on_mount(self) -> None:
        """Fill the table."""
        table = self.query_one(Table)
        table.add_columns(*self._columns)
        self.query_one(Input).display = False
        self.made = True
        self.fill()
        table.focus()

    def fill(self) -> None:
        """Make the rows again; the cursor stays where it is."""
        table = self.query_one(Table)
        cursor, every = table.cursor_row, self._make()
        self.rows = [row for row in every if row.fits(self._words)] if self.narrows else every
        table.clear()
        table.add_rows([Text(shown(cell), style=row.style, no_wrap=True) for cell in row.cells] for row in self.rows)
        if 0 < cursor < len(self.rows):
            table.move_cursor(row=cursor)
        words = f" with {' '.join(self._words)}" if self._words and self.narrows else ""
        app = cast(Browser, self.app)
        state = ", reading" if app.reading else "" if app.entries else ", nothing is recorded here yet"
        told = f"{self._heading}: {len(self.rows)}{words}{state}" if self.narrows else self._heading
        self.query_one("#heading", Static).update(Text(shown(told), no_wrap=True))

    def action_find(self) -> None:
        """Ask for words."""
        asking = self.query_one(Input)
        asking.display = True
        asking.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Filter by the words, or go to the first row that has them."""
        self._words = event.value.split()
        self._answered()
        if self.narrows:
            self.fill()
        else:
            self.action_step(1)

    def _answered(self) -> None:
        self.query_one(Input).display = False
        self.query_one(Table).focus()

    def action_step(self, direction: int) -> None:
        """Go to the next row (1), or the previous one (-1), that has the words; after the last comes the first."""
        table, count = self.query_one(Table), len(self.rows)
        for far in range(1, count + 1):
            at = (table.cursor_row + direction * far) % count
            if self._words and self.rows[at].fits(self._words):
                table.move_cursor(row=at)
                return
        self.app.bell()

    def action_back(self) -> None:
        """Leave the question, or this screen if it is not the first."""
        if self.query_one(Input).display:
            self._answered()
        elif len(self.app.screen_stack) > 2:  # below is the app's own empty one
            self.app.pop_screen()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open what the row is about."""
        if event.cursor_row < len(self.rows):
            opened = self._opens(self.rows[event.cursor_row].about)
            if opened is not None:
                self.app.push_screen(opened)


class Tokens(Listing):
    """Tokens are those of one reply, or of what was read before one."""

    BINDINGS: ClassVar = [Binding("l", "least", "Least probable")]

    def __init__(self, heading: str, make: Callable[[], list[Row]]) -> None:
        super().__init__(heading, lines.TOKENS, make, filters=False)
        self._seen = 0

    def action_least(self) -> None:
        """Go to the least probable token, then to the next."""
        known = [at for at, row in enumerate(self.rows) if row.figures["logprob"] is not None]
        known.sort(key=lambda at: self.rows[at].figures["logprob"])
        if known:
            self.query_one(Table).move_cursor(row=known[self._seen % len(known)])
            self._seen += 1


class Browser(App[None]):
    """A browser shows runs: their tasks, the episodes of a task, an episode, tokens. It writes nothing."""

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, runs: Sequence[Path]) -> None:
        super().__init__()
        self._runs = runs
        self.entries: list[Entry] = []
        self.damage: list[str] = []
        self.reading = False

    def on_mount(self) -> None:
        """Show the first list and read the records beside it."""
        self.push_screen(self._choice_of_runs() if len(self._runs) > 1 else self._tasks_of(None))
        self.action_again()

    def action_again(self) -> None:
        """Read all records again, unless they are being read."""
        if not self.reading:
            self.reading = True
            self.run_worker(self._read_all, thread=True)

    def _read_all(self) -> None:
        found: list[Entry] = []
        damage: list[str] = []
        for run in self._runs:
            try:
                for entry in lines.entries(run, damage):
                    found.append(entry)
                    # While records are read again, what was there stays.
                    if len(found) % _EACH == 0 and len(found) > len(self.entries):
                        self.call_from_thread(self._show, found[:], [])
            except OSError as error:
                damage.append(str(error))
        self.reading = False
        self.call_from_thread(self._show, found, damage)

    def _show(self, found: list[Entry], damage: list[str]) -> None:
        self.entries, self.damage = found, damage
        for screen in self.screen_stack:
            if isinstance(screen, Listing) and screen.narrows and screen.made:
                screen.fill()

    def _choice_of_runs(self) -> Screen[None]:
        def make() -> list[Row]:
            names: list[Path | None] = [None, *self._runs]
            return [self._row_of(run, [one for one in self.entries if run in (None, one.run)]) for run in names]

        return Listing("runs", ("run", "tasks", "episodes", "resolved"), make, self._tasks_of)

    def _row_of(self, run: Path | None, found: list[Entry]) -> Row:
        resolved = sum(one.figures["resolved"] for one in found)
        counts = (len({one.figures["task"] for one in found}), len(found), resolved)
        return Row((str(run or "all of them"), *map(str, counts)), {"episodes": len(found), "resolved": resolved}, run)

    def _tasks_of(self, run: Path | None) -> Screen[None]:
        def make() -> list[Row]:
            found = [one for one in self.entries if run in (None, one.run)]
            return [*lines.tasks(found), *(Row((text,), style="red") for text in self.damage)]

        heading = f"tasks of {run or ', '.join(map(str, self._runs))}"
        return Listing(heading, lines.TASKS, make, functools.partial(self._episodes_of, run))

    def _episodes_of(self, run: Path | None, task: str | None) -> Screen[None] | None:
        def make() -> list[Row]:
            return lines.episodes(one for one in self.entries if run in (None, one.run) and one.figures["task"] == task)

        return None if task is None else Listing(f"episodes of {task}", lines.EPISODES, make, self._episode)

    def _episode(self, entry: Entry) -> Screen[None]:
        try:
            record = record_at(entry.path, entry.offset)
        except (CorruptRecordError, OSError) as error:
            text = str(error)
            return Listing("not readable", ("",), lambda: [Row((text,), style="red")], filters=False)
        decode = decoder(record)
        width = max(20, self.size.width - 6)
        make = functools.partial(lines.conversation, record, decode, width)
        opens = functools.partial(self._tokens_of, record, decode)
        return Listing(f"{record.episode}, enter: tokens", ("",), make, opens, filters=False)

    def _tokens_of(self, record: Record, decode: Decode | None, number: int | None) -> Screen[None] | None:
        if number is None:
            return None
        node = record.nodes[number]
        what = "read" if node.logprobs is None else "sampled"
        heading = f"{record.episode}, {number}: {node.length} tokens {what} {lines.versions(node)}"
        return Tokens(heading, functools.partial(lines.tokens, node, decode))


def decoder(record: Record) -> Decode | None:
    """Return what decodes a record's ids, or None if its tokenizer is not where it was."""
    try:
        tokenizer = _tokenizer(record.model)
    except (OSError, ValueError, KeyError):
        return None
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


@functools.lru_cache(maxsize=4)
def _tokenizer(model: str) -> Any:
    return tokenizer_of(model)
