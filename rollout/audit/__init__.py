"""Prove from a run's episode records that the trainer received exactly what was sampled.

    python -m rollout.audit RUN

Every record is checked with code that shares nothing with the session tree:

1. Each call of the engine is what it was when it crossed the engine's border: prompt ids (the path of its node),
   sampled ids, log-probabilities and weight versions reproduce the seal that was made there.
2. Every sampled token that the agent received is in exactly one training row, once. It is in none if it belongs to a
   side call that is served but not trained on, if the infrastructure failed, or if the agent does not report the reply.
3. Each row is the path of its last node: ids, mask (1 on the tokens that the row trains on, 0 elsewhere) and
   log-probabilities reproduce the digest of what was given to the trainer; its weight versions are its nodes'.
4. The sampled ids decode to the recorded text, and that text says the content blocks that were sent. Where a prompt
   goes on after a reply, the reply's turn is closed as the model's chat template closes it.
5. What the agent reports as received (in its own event stream) is what was sent, and all of it is marked as delivered.
   What its tools ran is what was sampled. Exactly the agent's own replies are trained on. These are the replies that it
   reports and all before them, and the longest path of the first conversation and of each that has a reported reply. A
   reply without calls is the agent's own, too, if it follows one of these or its prompt begins like one of these
   conversations (a summary).
6. What a record says in several places agrees: outcome, reason, tests and reward; the agent's status, its last event
   and whether a limit ended it; counters and replies.
7. A record is what it was when it was written: all that it says reproduces its seal. Each follows the one before it in
   its file and has the same version. No episode, no reply's name and no other episode's content is there twice.
8. Every line of episode_metrics and of journals has its record, and all figures of it; every record has its line. An
   episode that a selection inside the run has copied (rl.data.select) is the same as in the record it was copied from.
9. Where a config says what is done with roles of calls (proxy.roles), each reply has the role that the agent's events
   tell, and was answered and trained on as the config says. Rewards of rows are finite, one for each.
10. All episodes of a group, which are compared with each other, were played by the same agent.

The exit status is 0, with one summary line, or 1, with one line per finding. docs/records.md says how each field is
proven, and what cannot be found.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rollout import program
from rollout.audit.claims import audit_claims
from rollout.audit.heard import audit_heard
from rollout.audit.lines import Lines
from rollout.audit.roles import audit_roles
from rollout.audit.texts import audit_text, audit_turns, closing_of, tokenizer_of
from rollout.audit.tokens import SEALS, audit_tokens, infra_failed, torn_columns
from rollout.reading import FormatReading
from rollout.records import SEALED, SELECTION, Record, content_of
from rollout.records.reading import Reader


class Audit:
    """An audit is what has been read of a run's records; ``findings`` has one line each, ``total`` the counts."""

    def __init__(self, source: Path, model: Path | None = None) -> None:
        self.reader, self.model = Reader(source, damage=[]), model
        self.findings: list[str] = []
        self.unknown: set[str] = set()  # why it is not known what closes a turn
        self.total: Counter[str] = Counter()
        self.contents: dict[str, bytes] = {}  # by episode, a hash of all that its record says
        self.names: dict[object, str] = {}  # what no two episodes have in common, and whose it is
        self.agents: dict[object, str] = {}  # of each group in a step, the agent's name
        self.tokenizer = functools.cache(tokenizer_of)
        self.closing = functools.cache(lambda model: closing_of(Path(model), self.tokenizer(model)))
        self.reading = functools.cache(FormatReading)
        self.lines: Lines | None = None

    def read(self) -> None:
        """Audit all records. Raises FileNotFoundError without a run or tokenizer, ValueError for an unknown format."""
        if self.reader.source.is_dir():
            self.lines = Lines(self.reader.source)
        for copied, path in sorted((self._is_copy(path), path) for path in self.reader.files()):
            self._file(path, copied)
            self.findings += self.reader.damage or ()
            self.reader.damage = []
        if self.lines is not None:
            self.findings += [*self.lines.findings, *self.lines.left(self.contents)]
            self.lines.close()

    def _is_copy(self, path: Path) -> bool:
        """Tell whether a file belongs to a selection inside the run."""
        inside = path.relative_to(self.reader.source).parents if path != self.reader.source else ()
        return any((self.reader.source / place / SELECTION).exists() for place in list(inside)[:-1])

    def _file(self, path: Path, copied: bool) -> None:
        """Audit the records of a file. One process writes a file, so all of its records have one version, and only the
        last may lack its line; a selection has records of many files."""
        chosen = any((place / SELECTION).exists() for place in list(path.parents)[:2])
        told = not chosen and self.lines is not None and path.parent.parent in self.lines.told
        version, lacking = None, ""
        for _, payload, record in self.reader.whole(path):
            name = f"{record.episode} ({record.task})"
            problems = [f"{name}: {problem}" for problem in self._record(record, payload, copied, chosen)]
            if not chosen and version not in (None, record.version):
                problems.append(f"{name}: its version is {record.version}, but that of the record before it {version}")
            version = record.version
            self.findings += [f"{path.name}, {problem}" for problem in problems]
            if lacking:
                self.findings.append(f"{path.name}, {lacking}: no line tells of this episode")
            lacks = told and self.lines is not None and not self.lines.has(record.episode)
            lacking = name if lacks and record.version >= SEALED else ""

    def _record(self, record: Record, payload: bytes, copied: bool, chosen: bool) -> Iterator[str]:
        content = content_of(payload)
        before = self.contents.get(record.episode)
        if record.version >= SEALED and content != record.seal:
            yield "it is not what was recorded: its content does not reproduce its seal"
        if copied and before is not None:
            if before != content:
                yield "a selection has another record of it"
            return
        self.contents[record.episode] = content
        if before is not None:
            yield "this episode is recorded twice"
        else:
            yield from self._unique(record)
        if record.attempt > 0 and not chosen and record.version >= SEALED:
            first = record.episode.removesuffix(f".{record.attempt}")
            if (first if record.attempt == 1 else f"{first}.{record.attempt - 1}") not in self.contents:
                yield f"it is attempt {record.attempt}, and the one before it is not recorded"
        try:
            self._count(record)
            yield from self._checks(record)
            if self.lines is not None and not torn_columns(record):
                self.findings += self.lines.compare(record)
        except (FileNotFoundError, ImportError):  # no tokenizer: nobody's record is at fault
            raise
        except Exception as error:  # whoever can write a record can make any field of it senseless
            yield f"it cannot be read: {type(error).__name__}: {error}"

    def _checks(self, record: Record) -> Iterator[str]:
        group, kind = record.trainer.get("session", "").rpartition("_")[0], record.agent.get("kind")
        if group and kind and (other := self.agents.setdefault((group, record.step), kind)) != kind:
            yield f"it was played by {kind}, but its group by {other}"
        yield from audit_tokens(record)
        if torn_columns(record):
            return
        yield from audit_heard(record)
        yield from audit_claims(record)
        yield from audit_roles(record)
        if not record.nodes:  # an evaluation of another endpoint leaves none, and has no tokenizer
            return
        model = str(self.model or record.model)
        yield from audit_text(record, self.tokenizer(model), self.reading(record.parser, record.version < SEALS))
        try:
            closing = self.closing(model)
        except ValueError as error:
            self.unknown.add(str(error))
        else:
            yield from audit_turns(record, closing) if closing is not None else ()

    def _unique(self, record: Record) -> Iterator[str]:
        """Yield what another episode has as well: the names of replies, which begin with their session's id, and the
        moment at which it began with its length. With a seed, sessions that are played again have the same id."""
        replies = [node for node in record.nodes if node.logprobs is not None]
        seeded = "seed" in record.sampling
        names = {(node.message_id[:20], node.started if seeded else 0.0) for node in replies}
        names = {name for name in names if name[0].startswith("msg_") and (name[1] or not seeded)}
        if record.started and record.timing.get("total"):
            names.add((str(record.started), record.timing["total"]))
        for name in names:
            if (owner := self.names.setdefault(name, record.episode)) != record.episode:
                yield f"it has the replies or the time of another episode, {owner}"
                return

    def _count(self, record: Record) -> None:
        self.total["episodes"] += 1
        self.total["rows"] += len(record.rows)
        self.total["foreign"] += int(record.counters.get("foreign_calls", 0))
        self.total["unknown"] += int(record.counters.get("unknown_reports", 0))
        for node in record.nodes:
            kind = "context" if node.logprobs is None else "sampled" if node.delivered else "undelivered"
            if infra_failed(record):
                kind = "left out"
            self.total[kind] += node.length
            self.total["replies"] += node.logprobs is not None


def main(argv: list[str] | None = None) -> int:
    """Audit a run and return the exit status."""
    options = program.parser("python -m rollout.audit", __doc__)
    options.add_argument("run", type=Path, metavar="RUN", help="a run directory or one record file")
    options.add_argument("--model", type=Path, help="directory of the policy's tokenizer (default: the recorded one)")
    args = options.parse_args(argv)
    run = Audit(args.run, args.model)
    try:
        run.read()
    except (FileNotFoundError, ValueError) as error:
        return program.failed(f"audit: {error}")
    for finding in run.findings:
        print(finding, file=sys.stderr)
    for torn in run.reader.torn:
        print(f"note: {torn.path}: its last record is incomplete (the process was killed); {torn.lost} bytes ignored")
    for reason in sorted(run.unknown):
        print(f"note: it is not looked at whether turns are closed: {reason}")
    total = run.total
    if total["foreign"]:
        print(f"note: {total['foreign']} replies were not asked for by the agent itself, and are not trained on")
    if total["unknown"]:
        print(
            f"note: {total['unknown']} replies that agents report were sent by nobody: something else wrote the report"
        )
    if not total["episodes"]:
        return program.failed(f"audit: no episode records under {args.run}")
    print(
        f"{'FAILED' if run.findings else 'ok'}: {total['episodes']} episodes, {total['replies']} replies, "
        f"{total['rows']} rows, {total['sampled']} sampled tokens, each trained on once, "
        f"{total['undelivered']} undelivered, {total['context']} context tokens, "
        f"{total['left out']} left out because the infrastructure failed, {len(run.findings)} findings"
    )
    return 1 if run.findings else 0
