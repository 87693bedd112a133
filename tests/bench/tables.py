"""What was measured as tables, for a terminal and for the page; and how it stands to the goals.

As a program it writes the tables of `docs/performance.md` anew from the last measurements: `make page`.
"""

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs/performance.md"
MEASURED = Path(".bench")
Content = dict[str, Any]
CALLERS = 64
WAL_BYTES_MAX = 2_200
ROUND_TRIPS_MAX = 0.2
P99_MS_MAX = 15.0
LONE_CALLER_MAX = 1.3


@dataclass(frozen=True, slots=True)
class Goal:
    """A number that is to be at least or at most a bound, with its value in each round."""

    text: str
    bound: float
    values: Sequence[float]
    at_least: bool = True
    unit: str = ""

    @property
    def is_reached(self) -> bool:
        """Whether the median keeps to the bound."""
        median = statistics.median(self.values)
        return median >= self.bound if self.at_least else median <= self.bound

    @property
    def row(self) -> list[str]:
        """The goal as a row of a table."""
        side = "at least" if self.at_least else "at most"
        return [
            self.text,
            f"{side} {self.bound:g}{self.unit}",
            f"{number(statistics.median(self.values))}{self.unit} ({spread(self.values)})",
            "reached" if self.is_reached else "**missed**",
        ]


def number(value: float) -> str:
    """Write a number with three digits that matter."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 1 else f"{value:.2g}"


def spread(values: Sequence[float]) -> str:
    """Write the least and the greatest of some values."""
    return f"{number(min(values))} to {number(max(values))}"


def run_text(run: Content) -> str:
    """Write one measurement as a line."""
    text = f"{run['per_second']:,.0f}/s, p50 {run['p50_ms']:.2f} ms, p99 {run['p99_ms']:.2f} ms"
    if "server_us" in run:
        text += f", {run['server_us']:.0f} us of the server"
    if "postgres_us" in run:
        text += f", {run['postgres_us']:.0f} us of Postgres, {run['wal_bytes']:,.0f} bytes of WAL"
    if "cpu_seconds" in run:
        text += f"; load generator {100 * run['cpu_seconds'] / run['seconds']:.0f}% of a core"
    return text


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Write a table in Markdown; what is beside the first column is aligned right where it is a number."""
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    lines = [heads, ["-" * width for width in widths], *rows]
    return "\n".join("| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines)


def ratios(content: Content, one: str, other: str, what: str = "per_second") -> list[float]:
    """Give how one measurement stands to another, round by round; nothing where either wasn't made."""
    runs = content["runs"]
    return [a[what] / b[what] for a, b in zip(runs.get(one, ()), runs.get(other, ()), strict=False)]


def goals(content: Content) -> Iterator[Goal]:
    """Give the goals as far as what they compare was measured."""
    runs, once = content["runs"], content["once"]
    for kind, other, name, bound in (
        ("first", "echo", "the echo", 0.60),
        ("first", "pgbench", "pgbench's two transactions", 0.85),
        ("first", "Restate first", "Restate", 3.0),
        ("first", "DBOS first", "DBOS with a step", 20.0),
        ("replay", "echo", "the echo", 0.85),
        ("replay", "Restate replay", "Restate", 1.1),
        ("replay", "DBOS replay", "DBOS", 16.0),
    ):
        if values := ratios(content, f"{kind}@{CALLERS}", f"{other}@{CALLERS}"):
            what = "first decisions" if kind == "first" else "replays"
            yield Goal(f"{what} at {CALLERS} callers, to {name}", bound, values, unit="x")
    if lone := lone_caller(content):
        text = "one caller: p50 less the policy's own time, to the p50 of echo and pgbench together"
        yield Goal(text, LONE_CALLER_MAX, lone, at_least=False, unit="x")
    for kind, what in (("first", "first decisions"), ("replay", "replays")):
        if half := runs.get(f"{kind}@half"):
            p99 = [run["p99_ms"] for run in half]
            yield Goal(f"{what} at half of the peak rate, open loop: p99", P99_MS_MAX, p99, at_least=False, unit=" ms")
    if "first_round_trips" in once:
        trips = [once["first_round_trips"]]
        yield Goal(
            f"round trips to Postgres per first decision at {CALLERS} callers", ROUND_TRIPS_MAX, trips, at_least=False
        )
    if first := runs.get(f"first@{CALLERS}"):
        wal = [run["wal_bytes"] for run in first]
        yield Goal(f"WAL per first decision at {CALLERS} callers", WAL_BYTES_MAX, wal, at_least=False, unit=" bytes")


def lone_caller(content: Content) -> list[float]:
    """Give, round by round, how a lone caller's time stands to what its parts take at least."""
    runs = content["runs"]
    columns = [runs.get(f"{name}@1", ()) for name in ("first", "echo", "pgbench")]
    policy = content["once"].get("policy_ms", 0.0)
    return [
        (first["p50_ms"] - policy) / (echo["p50_ms"] + pgbench["p50_ms"])
        for first, echo, pgbench in zip(*columns, strict=False)
    ]


def throughput(content: Content) -> str:
    """Write everything that a run of `throughput.py` found."""
    parts = [_about(content), _rates(content), _costs(content), _half(content), _peers(content), _goals(content)]
    return "\n\n".join(part for part in parts if part)


def _about(content: Content) -> str:
    machine, plan = content["machine"], content["plan"]
    return (
        f"Measured {content['made'][:10]} at {machine['commit']}: {machine['cores']} cores ({machine['processor']}), "
        f"{machine['memory_gb']} GB, {machine['system']}, Python {machine['python']}, grpcio {machine['grpcio']}, "
        f"PostgreSQL {machine['postgres']}; everything on one machine. {plan['workers']} processes each of the service "
        f"and of the echo, medians of {plan['rounds']} rounds of {plan['seconds']} s."
    )


def _rates(content: Content) -> str:
    callers = content["plan"]["callers"]
    names = dict.fromkeys(name.partition("@")[0] for name in content["runs"])

    def cell(name: str, count: int) -> str:
        values = [run["per_second"] for run in content["runs"].get(f"{name}@{count}", ())]
        return f"{number(statistics.median(values))} ({spread(values)})" if values else "-"

    heads = ["calls per second (least to most), by callers", *map(str, callers)]
    return table(heads, [[LABELS.get(name, name), *(cell(name, count) for count in callers)] for name in names])


def _costs(content: Content) -> str:
    rows = []
    for name, runs in content["runs"].items():
        if not name.endswith((f"@{CALLERS}", "@1")):
            continue
        kind, _, callers = name.partition("@")
        cells = [_median(runs, what) for what in ("p50_ms", "p99_ms", "server_us", "postgres_us", "wal_bytes")]
        rows.append([LABELS.get(kind, kind), callers, *cells])
    heads = ["", "callers", "p50 ms", "p99 ms", "server CPU us", "Postgres CPU us", "WAL bytes"]
    return table(heads, rows)


def _median(runs: Sequence[Content], what: str) -> str:
    values = [run[what] for run in runs if what in run]
    return number(statistics.median(values)) if values else "-"


def _half(content: Content) -> str:
    shown = {"calls/s": "per_second", "p50 ms": "p50_ms", "p95 ms": "p95_ms", "p99 ms": "p99_ms", "max ms": "max_ms"}
    rows = [
        [LABELS[kind], *(_median(runs, what) for what in shown.values())]
        for kind in ("first", "replay")
        if (runs := content["runs"].get(f"{kind}@half"))
    ]
    return table(["half of the peak, open loop", *shown], rows) if rows else ""


def _peers(content: Content) -> str:
    rows = [
        ["gRPC echo", "nothing: it parses, and answers with a message of the same size", "any memory of a call"],
        ["pgbench", "both commits of each decision, on disk", "gRPC, authentication, facts schema, policy"],
    ]
    for name, peer in content["peers"].items():
        missing = f"; **not measured: {peer['missing']}**" if "missing" in peer else ""
        rows.append([name, peer["promises"] + missing, peer["lacks"]])
    return table(["beside it", "promises", "lacks"], rows)


def _goals(content: Content) -> str:
    return table(["goal", "bound", "median (least to most)", ""], [goal.row for goal in goals(content)])


def profile(content: Content) -> str:
    """Write everything that a run of `phases.py` found."""
    kinds = [kind for kind in ("first", "replay") if kind in content]
    spent = {kind: content[kind]["phases_us"] for kind in kinds}
    names = sorted(
        {name for phases in spent.values() for name in phases}, key=lambda name: -spent[kinds[0]].get(name, 0)
    )
    # A process that ended meanwhile took its time along: what is below nothing is nothing.
    rows = [[name, *(number(max(0.0, spent[kind].get(name, 0.0))) for kind in kinds)] for name in names]
    rows.append(["all", *(number(sum(spent[kind].values())) for kind in kinds)])
    heads = [f"CPU time per call at {CALLERS} callers, us", *(LABELS[kind] for kind in kinds)]
    about = f"Sampled {content['made'][:10]} at {content['machine']['commit']}."
    return f"{about}\n\n{table(heads, rows)}"


MINUTES_COMPARED = 5
ROWS_KEEP_MIN = 0.9
MEMORY_GROWTH_MAX = 1.05
P99_DRIFT_MAX = 1.3


def growth(content: Content) -> str:
    """Write everything that a run of `growth.py` found."""
    parts = [f"Measured {content['made'][:10]} at {content['machine']['commit']}."]
    if "size" in content:
        parts.append(_size(content["size"]))
    if "time" in content:
        parts.append(_time(content["time"]))
    parts.append(table(["goal", "bound", "median (least to most)", ""], [goal.row for goal in growth_goals(content)]))
    return "\n\n".join(parts)


def _size(size: Content) -> str:
    sizes = {"few": "10,000", "many": f"{size['rows']:,}"}
    rows = []
    for name, runs in size["runs"].items():
        kind, which = name.split()
        rates = [run["per_second"] for run in runs]
        times = (_median(runs, "p50_ms"), _median(runs, "p99_ms"))
        rows.append([LABELS[kind], sizes[which], number(statistics.median(rates)), spread(rates), *times])
    heads = [f"at {CALLERS} callers", "decisions before", "calls/s", "least to most", "p50 ms", "p99 ms"]
    planted = (
        f"Planted in {size['planting_s']:,.0f} s; {size['bytes_per_decision']:,.0f} bytes a decision, with indexes."
    )
    return f"{planted}\n\n{table(heads, rows)}"


def _time(time: Content) -> str:
    minutes = time["minutes"]
    rows = [
        [
            str(i + 1),
            *(number(minutes[i][what]) for what in ("per_second", "p50_ms", "p99_ms", "memory_mb")),
            number(minutes[i]["ledger_bytes"] / minutes[i]["ledger_rows"]),
            number(minutes[i]["outbox_bytes"] / 2**20),
        ]
        for i in sorted({*range(0, len(minutes), MINUTES_COMPARED), len(minutes) - 1})
    ]
    heads = ["minute", "calls/s", "p50 ms", "p99 ms", "memory MB", "bytes a decision", "outbox MB"]
    return table(heads, rows)


def growth_goals(content: Content) -> Iterator[Goal]:
    """Give the goals of growth as far as they were measured."""
    for kind, what in (("first", "first decisions"), ("replay", "replays")):
        if values := ratios(content.get("size", {"runs": {}}), f"{kind} many", f"{kind} few"):
            yield Goal(
                f"{what} on {content['size']['rows']:,} decisions, to those on 10,000", ROWS_KEEP_MIN, values, unit="x"
            )
    minutes = content.get("time", {}).get("minutes", [])
    if len(minutes) >= 2 * MINUTES_COMPARED:
        first, last = minutes[:MINUTES_COMPARED], minutes[-MINUTES_COMPARED:]
        memory = [minute["memory_mb"] / first[-1]["memory_mb"] for minute in last]
        yield Goal("memory in the last five minutes, to the fifth", MEMORY_GROWTH_MAX, memory, at_least=False, unit="x")
        before = statistics.median(minute["p99_ms"] for minute in first)
        p99 = [minute["p99_ms"] / before for minute in last]
        yield Goal("p99 of the last five minutes, to the first five", P99_DRIFT_MAX, p99, at_least=False, unit="x")


LABELS = {
    "first": "decideonce, first decisions",
    "replay": "decideonce, replays",
    "echo": "gRPC echo",
    "pgbench": "pgbench, both transactions",
}
SECTIONS: dict[str, Callable[[Content], str]] = {"throughput": throughput, "growth": growth, "profile": profile}


def with_section(page: str, name: str, text: str) -> str:
    """Give a page with other text between a section's markers."""
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    before, found, rest = page.partition(begin)
    _, also_found, after = rest.partition(end)
    if not found or not also_found:
        raise ValueError(f"the page has no {begin.strip()} … {end}")
    return f"{before}{begin}{text}\n{end}{after}"


def main() -> None:
    """Write the page's tables from what was measured last."""
    page = PAGE.read_text()
    for name, write in SECTIONS.items():
        measured = MEASURED / f"{name}.json"
        if measured.exists():
            page = with_section(page, name, write(json.loads(measured.read_text())))
            print(f"{PAGE.name}: {name} from {measured}")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
