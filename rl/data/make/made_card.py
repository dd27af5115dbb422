"""The part of a card that is about made tasks: their packages and makers, and how much was tried for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rl.data.make.prepare import PreparedPackage
from rl.data.make.trials import TrialOutcome

_REASONS = 5  # of a package that are in the document


def of_package(
    prepared: PreparedPackage, records: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]
) -> dict:
    """Return what a card says of one package. records: {"maker", "outcome"} of all candidates that were tried."""
    package = prepared.package
    return {
        "package": package.name,
        "version": package.version,
        "sha256": package.sha256,
        "licence": package.licence,
        "tests": len(prepared.order),
        "stable": len(prepared.stable),
        "flaky": list(prepared.flaky),
        "unused": prepared.unused,
        "not_collected": {where: why.strip().splitlines()[-1:] for where, why in prepared.broken},
        "suite_seconds": prepared.seconds,
        "tasks": len(rows),
        "statements_with_a_program": sum(row["shown"] != "0" for row in rows),
        "outcomes": dict(Counter(record["outcome"] for record in records)),
        "makers": by_maker(records),
        "environment": prepared.versions,
    }


def by_maker(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return how many candidates of each maker were tried and kept."""
    tried = Counter(record["maker"] for record in records)
    kept = Counter(record["maker"] for record in records if record["outcome"] == TrialOutcome.KEPT)
    return {maker: {"tried": tried[maker], "kept": kept[maker]} for maker in sorted(tried)}


def summary(card: Mapping[str, Any]) -> dict[str, Any]:
    """Return a card's totals: tasks, yields of single and of combined edits, share of flaky failures."""
    outcomes: Counter[str] = Counter()
    makers: dict[str, Counter[str]] = {}
    for package in card["packages"]:
        outcomes.update(package["outcomes"])
        for maker, counts in package["makers"].items():
            makers.setdefault(maker, Counter()).update(counts)
    groups: dict[str, Counter[str]] = {"single": Counter(), "combined": Counter()}
    for maker, counts in makers.items():
        groups["combined" if maker.startswith("combine") else "single"].update(counts)
    broke = sum(
        outcomes[one]
        for one in (TrialOutcome.KEPT, TrialOutcome.FLAKY, TrialOutcome.NOT_HIDDEN, TrialOutcome.MISGRADED)
    )
    return {
        "tasks": sum(package["tasks"] for package in card["packages"]),
        "outcomes": dict(outcomes),
        "makers": {maker: dict(counts) for maker, counts in sorted(makers.items())},
        "yield": {kind: round(c["kept"] / c["tried"], 3) if c["tried"] else None for kind, c in groups.items()},
        "flake_rate": round(outcomes[TrialOutcome.FLAKY] / broke, 4) if broke else None,
    }


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def to_markdown(card: Mapping[str, Any]) -> list[str]:
    """Return a card as lines of a document for people."""
    total = card["summary"]
    lines = [
        f"Seed {card['seed']}, Python {card['python']}, level of help {card['level']}. "
        f"{card['minutes_per_100_tasks'] or '?'} minutes per 100 tasks with {card['jobs']} boxes at a time "
        f"(all sessions of the command together). Of the edits that broke a few tests, "
        f"{100 * (total['flake_rate'] or 0):.1f} % did not do so each time.",
        "",
        "| package | version | licence | tests | flaky | tasks | with a program | SHA-256 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in card["packages"]:
        lines.append(
            f"| {one['package']} | {one['version']} | {one['licence']} | {one['stable']} of {one['tests']} "
            f"| {len(one['flaky'])} | {one['tasks']} | {one['statements_with_a_program']} | `{one['sha256'][:16]}` |"
        )
    unused = [(one["package"], why, n) for one in card["packages"] for why, n in [*one["unused"].items()][:_REASONS]]
    if unused:
        lines += ["", "| package | why tests are not used | tests |", "| --- | --- | --- |"]
        lines += [f"| {package} | {_cell(why)} | {count} |" for package, why, count in unused]
    lines += ["", "| maker | tried | kept | yield | of all tasks |", "| --- | --- | --- | --- | --- |"]
    for maker, counts in sorted(total["makers"].items(), key=lambda item: -item[1]["kept"]):
        tried, kept = counts["tried"], counts["kept"]
        share = 100 * kept / max(1, total["tasks"])
        lines.append(f"| `{maker}` | {tried} | {kept} | {100 * kept / tried:.0f} % | {share:.0f} % |")
    lines += ["", "| what became of an edit | edits |", "| --- | --- |"]
    lines += [f"| {name} | {count} |" for name, count in sorted(total["outcomes"].items(), key=lambda item: -item[1])]
    if card["refused"]:
        lines += ["", "Packages that no task was made of:", ""]
        lines += [f"- {one}" for one in card["refused"]]
    return lines
