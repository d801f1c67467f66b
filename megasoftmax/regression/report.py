"""Reports of `megasoftmax.regression` for the terminal, and as one HTML file."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from io import StringIO

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table

from megasoftmax.regression.comparison import Check, Report
from megasoftmax.regression.dropout import QUANTITIES as OVER_SEEDS
from megasoftmax.regression.models import RegressionError
from megasoftmax.regression.training import PRECISIONS

Outcomes = Mapping[str, Report | RegressionError]
"""Of each model: its report, or why there is none."""

QUANTITIES = ("loss from equal weights", "gradient", "loss", "parameters")
IN_SUMMARY = ("loss,\nequal\nweights", "gradient", "loss", "weights\nat end")  # of QUANTITIES
NAMED_FAILURES = 8
MOST_TICKS = 40  # names of parameters under a plot
NARROW = 80  # columns of a terminal: with fewer, lines take the place of tables
SAME, DIFFERS, NO_RESULT = "[green]same[/green]", "[red]DIFFERS[/red]", "[red]no result[/red]"

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em;
  color: #222; background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .25em .8em; text-align: left; border-bottom: 1px solid #ddd }
td { font-variant-numeric: tabular-nums }
.passed { color: #176f2c } .failed { color: #b3261e; font-weight: 600 }
svg { max-width: 100%; height: auto }
"""


def print_report(console: Console, report: Report) -> None:
    """The verdict, a table of the distances, what both cost, and the worst failures."""
    console.print(f"{report.settings.model}: {_verdict(report)}", highlight=False)
    console.print(_title(report), highlight=False)
    is_narrow = console.width < NARROW
    print_distances = _print_lines if is_narrow else _print_tables
    print_distances(console, report)
    failures = [f"[red]REGRESSION[/red] {each}" for each in report.failures[:NAMED_FAILURES]]
    for line in [*_notes(report), *failures]:
        console.print(line, soft_wrap=not is_narrow, highlight=False)
    unnamed = len(report.failures) - NAMED_FAILURES
    if unnamed > 0:
        console.print(f"and {unnamed} more")


def _print_tables(console: Console, report: Report) -> None:
    table = Table(box=box.SIMPLE)
    table.add_column("distance from reference", no_wrap=True)
    for heading in ("baseline", "candidate", "allowed"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    for worst in _worst(report):
        table.add_row(*_distances(worst), _verdict_of_check(worst), f"{worst.step}")
    console.print(table)
    for worst in _worst(report):  # names are as long as they like
        if worst.parameter is not None:
            text = f"{worst.quantity}, worst of all parameters: {worst.parameter}"
            console.print(text, soft_wrap=True, highlight=False)
    costs = Table(box=box.SIMPLE)
    for heading in ("", "baseline", "candidate", "ratio"):
        costs.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for row in _costs(report):
        costs.add_row(*row)
    console.print(costs)


def _print_lines(console: Console, report: Report) -> None:
    headings = ("baseline", "candidate", "allowed")
    console.print("Distances from the reference:")
    for worst in _worst(report):
        quantity, *numbers = _distances(worst)
        console.print(f"{quantity}: {_verdict_of_check(worst)}", highlight=False)
        for heading, number in zip(headings, numbers, strict=True):
            console.print(f"  {heading:<9} {number:>10}", highlight=False)
        console.print(f"  worst: {_place(worst)}", highlight=False)
    for name, *numbers in _costs(report):
        console.print(f"{name}:", highlight=False)
        for heading, number in zip(("baseline", "candidate", "ratio"), numbers, strict=True):
            console.print(f"  {heading:<9} {number:>10}", highlight=False)


def print_summary(console: Console, outcomes: Outcomes) -> None:
    """A row per model; where the terminal is narrow, the verdicts alone."""
    if console.width < NARROW:
        console.print("All models:")
        for name, outcome in outcomes.items():
            verdict = _verdict(outcome) if isinstance(outcome, Report) else NO_RESULT
            console.print(f"{name}: {verdict}", highlight=False)
        return
    table = Table(title="All models", title_justify="left", box=box.SIMPLE)
    table.add_column("model", overflow="fold")
    for heading in (*IN_SUMMARY, "speed", "memory"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for name, outcome in outcomes.items():
        if isinstance(outcome, RegressionError):
            table.add_row(name, *[""] * (len(QUANTITIES) + 2), NO_RESULT)
            continue
        shares = (f"{worst.excess:.2f}" for worst in _worst(outcome, QUANTITIES))
        ratios = (ratio for *_, ratio in _costs(outcome))
        table.add_row(name, *shares, *ratios, SAME if outcome.passed else DIFFERS)
    console.print(table)
    console.print("Distances in units of the allowed ones; speed and memory, candidate / baseline.")
    reports = {name: each for name, each in outcomes.items() if isinstance(each, Report)}
    untested = [name for name, report in reports.items() if not report.kernels_tested]
    if untested:
        console.print(f"Kernels not tested: {', '.join(untested)}", highlight=False)


def to_json(outcomes: Outcomes) -> str:
    """{"passed": bool, "models": {name: a report, or {"error": why there is none}}}."""
    models = {
        name: {"error": str(outcome)} if isinstance(outcome, RegressionError) else outcome.to_dict()
        for name, outcome in outcomes.items()
    }
    found = {"passed": _all_passed(outcomes), "models": models}
    return json.dumps(found, indent=1, allow_nan=False)


def to_html(outcomes: Outcomes) -> str:
    """One page with curves and tables; it loads nothing."""
    title = "Training with another attention"
    sections = "\n".join(_section(name, outcome) for name, outcome in outcomes.items())
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n<h1>{title}: {_html_verdict(_all_passed(outcomes))}</h1>\n"
        f"{sections}\n</html>\n"
    )


def _all_passed(outcomes: Outcomes) -> bool:
    return all(isinstance(outcome, Report) and outcome.passed for outcome in outcomes.values())


def _title(report: Report) -> str:
    settings = report.settings
    return (
        f"{settings.model}: {settings.candidate} against {settings.baseline}, "
        f"{PRECISIONS[settings.dtype].meaning}, {settings.steps} steps"
    )


def _worst(report: Report, quantities: Sequence[str] = (*QUANTITIES, *OVER_SEEDS)) -> list[Check]:
    """The worst check of each of these quantities that was compared."""
    compared = {check.quantity for check in report.checks}
    return [report.worst(quantity) for quantity in quantities if quantity in compared]


def _distances(check: Check) -> tuple[str, ...]:
    numbers = (check.baseline, check.candidate, check.allowed)
    return check.quantity, *(f"{number:.1e}" for number in numbers)


def _place(check: Check) -> str:
    return f"step {check.step}" + ("" if check.parameter is None else f", {check.parameter}")


def _verdict_of_check(check: Check) -> str:
    return SAME if check.passed else DIFFERS


def _verdict(report: Report) -> str:
    """The verdict, with whether kernels were tested and how dropout was compared."""
    return (SAME if report.passed else DIFFERS) + _qualified(report)


def _qualified(report: Report) -> str:
    untested = "" if report.kernels_tested else ", kernels not tested"
    return untested if report.dropout is None else f"{untested}, dropout: {report.dropout}"


def _html_verdict(passed: bool) -> str:
    return '<span class="passed">same</span>' if passed else '<span class="failed">differs</span>'


def _costs(report: Report) -> Iterator[tuple[str, ...]]:
    """Rows of speed and memory: baseline, candidate, their ratio."""
    pair = report.baseline, report.candidate
    before, after = map(report.speed, pair)
    name = f"{report.items} per second, median step"
    yield name, f"{before:,.0f}", f"{after:,.0f}", f"{after / before:.2f}"
    peaks = [peak for peak in map(report.peak_mebibytes, pair) if peak is not None]
    name = "peak memory of a step, MiB"
    if not peaks:
        yield name, *["n/a"] * 3
    else:
        yield name, *(f"{peak:,.1f}" for peak in peaks), f"{peaks[1] / peaks[0]:.2f}"


def _notes(report: Report) -> Iterator[str]:
    yield ", ".join(f"{name} {value}" for name, value in report.environment.items())
    kernels = ", ".join(f"{name} × {count}" for name, count in report.kernels.items())
    yield f"kernels in a step of the candidate: {kernels or 'none of megasoftmax'}"
    if report.dropout is None:
        yield "dropout: switched off; --dropout compares with it"
    elif any(c.quantity in OVER_SEEDS for c in report.checks):
        yield (
            f"dropout: {report.dropout}. What is over seeds compares means of each side: "
            "the candidate's distance from the baseline's, with its standard error as baseline. "
            "All else is without dropout"
        )
    if report.repeated:
        steps = ", ".join(map(str, report.repeated))
        yield f"compared from weights close by as well: steps {steps}"


def _section(name: str, outcome: Report | RegressionError) -> str:
    if isinstance(outcome, RegressionError):
        return f'<h2>{escape(name)}</h2>\n<p class="failed">No result: {escape(str(outcome))}</p>'
    distances = [
        (*_distances(check), _html_verdict(check.passed), escape(_place(check)))
        for check in _worst(outcome)
    ]
    settings = [(escape(key), escape(str(value))) for key, value in vars(outcome.settings).items()]
    failures = "".join(f"<li>{escape(str(failure))}</li>" for failure in outcome.failures)
    headings = ("distance from the reference", "baseline", "candidate", "allowed", "verdict")
    return "\n".join(
        [
            f"<h2>{escape(_title(outcome))}: {_html_verdict(outcome.passed)}"
            f"{_qualified(outcome)}</h2>",
            _html_table((*headings, "where it is worst"), distances),
            _html_table(("", "baseline", "candidate", "ratio"), _costs(outcome)),
            *(f"<p>{escape(note)}</p>" for note in _notes(outcome)),
            f"<h3>Regressions, the worst first</h3><ol>{failures}</ol>" if failures else "",
            _curves(outcome),
            f"<details><summary>Settings</summary>{_html_table(('', ''), settings)}</details>",
        ]
    )


def _html_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _plot_checks(
    axes: Axes, report: Report, quantity: str, position: Callable[[Check], int]
) -> None:
    """Distances on a logarithmic axis; a distance of 0 has no place there."""
    checks = [check for check in report.checks if check.quantity == quantity]
    positions = [position(check) for check in checks]
    for name, marker, size in (("allowed", "_", 6), ("baseline", "o", 6), ("candidate", "x", 4)):
        values = [getattr(check, name) for check in checks]
        axes.plot(positions, values, marker, label=name, markersize=size)
    axes.set_yscale("log", nonpositive="mask")


def _curves(report: Report) -> str:
    """Losses, their distances, gradients and times, as an SVG."""
    figure = Figure(figsize=(10, 11), layout="constrained")
    parts = figure.subplot_mosaic([["losses", "distances"], ["gradients"] * 2, ["seconds"] * 2])
    losses, distances, gradients, seconds = parts.values()
    trainings = {"baseline": report.baseline, "candidate": report.candidate}
    # Of curves that agree, the widest is below, so that each can be seen.
    styles = zip((5, 3, 1.5), ("-", "--", ":"), strict=True)
    for (role, training), (width, style) in zip(
        (trainings | {"reference": report.reference}).items(), styles, strict=True
    ):
        label = f"{role}, {training.implementation}"
        losses.plot(training.losses, label=label, linewidth=width, linestyle=style)
    losses.set(title="loss, running free", xlabel="step")
    _plot_checks(distances, report, "loss", lambda check: check.step)
    distances.set(title="loss, distance from the reference", xlabel="step")
    names: dict[str | None, int] = {}
    for check in report.checks:
        if check.quantity == "gradient":
            names.setdefault(check.parameter, len(names))
    _plot_checks(gradients, report, "gradient", lambda check: names[check.parameter])
    gradients.set(title="gradients from equal weights, distance")
    every = max(-(-len(names) // MOST_TICKS), 1)
    ticks = {index: str(name) for name, index in names.items() if index % every == 0}
    gradients.set_xticks([*ticks], [*ticks.values()], rotation=90, fontsize=6)
    for role, training in trainings.items():
        seconds.plot([1e3 * second for second in training.seconds], label=role)
    seconds.set(title="milliseconds of a step", xlabel="step", ylim=(0, None))
    for axes in (losses, distances, gradients, seconds):
        axes.legend()
    text = StringIO()
    figure.savefig(
        text, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
    )
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
