"""Status for people: rich tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ftd.shm.state import State
from ftd.units import format_bytes, format_seconds

_COLOURS = {
    State.READY: "green",
    State.LOADING: "yellow",
    State.DRAINING: "yellow",
    State.FAILED: "red",
    State.HUNG: "red",
    State.STOPPED: "dim",
}


def print_list(reports: Sequence[Mapping[str, Any]]) -> None:
    """One row a namespace."""
    console = _console()
    if not reports:
        console.print("no namespaces on this host")
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("NAMESPACE", "STATE", "PID", "GENERATION", "WEIGHTS", "PIN", "FOLLOWERS", "UPTIME"):
        table.add_column(heading, overflow="fold")
    for shown in reports:
        model = shown["model"]
        table.add_row(
            shown["namespace"],
            _state(shown),
            _text(shown["pid"]),
            _text(shown["generation"]),
            format_bytes(model["bytes"]) if model else "-",
            shown["pin"],
            str(len(shown["followers"])),
            _seconds(shown["uptime_s"]),
        )
    console.print(table)
    for shown in reports:
        _print_troubles(console, shown, prefix=f"{shown['namespace']}: ")


def print_one(shown: Mapping[str, Any]) -> None:
    """Everything about one namespace."""
    console = _console()
    facts = Table(box=None, show_header=False, pad_edge=False)
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name, value in _facts(shown):
        facts.add_row(name, value)
    console.print(facts)
    if shown["segments"]:
        console.print(_segments(shown["segments"]))
    if shown["followers"]:
        console.print(_followers(shown["followers"]))
    _print_troubles(console, shown, prefix="")


def _facts(shown: Mapping[str, Any]) -> list[tuple[str, str | Text]]:
    rows: list[tuple[str, str | Text]] = [("namespace", shown["namespace"]), ("state", _state(shown))]
    if shown["stage"] is not None:
        rows.append(("stage", shown["stage"]))
    if shown["pid"] is not None:
        rows.append(("daemon", f"pid {shown['pid']}, up {_seconds(shown['uptime_s'])}, heartbeat"
                               f" {_seconds(shown['heartbeat_age_s'])} ago"))  # fmt: skip
    if shown["generation"] is not None:
        rows.append(("generation", f"{shown['generation']}, fingerprint {shown['fingerprint'] or '-'}"))
    model = shown["model"]
    if model:
        dtypes = ", ".join(f"{name} {format_bytes(size)}" for name, size in model["dtypes"].items())
        rows.append(("model", f"{model['source']}"))
        rows.append(("weights", f"{model['tensors']} tensors, {format_bytes(model['bytes'])} ({dtypes})"))
        if model["digest"]:
            rows.append(("digest", model["digest"]))
        rows.append(("pin", shown["pin"]))
    for push in shown["push"]:
        text = f"{format_bytes(push['pushed_bytes'])} to {push['gpu']}, {push['clients']} followers now"
        rows.append(("pushed", text))
    progress = shown["progress"]
    if progress["bytes_total"]:
        eta = progress["eta_s"]
        rest = f", {format_seconds(eta)} left" if shown["state"] == State.LOADING and eta else ""
        done, total = format_bytes(progress["bytes_done"]), format_bytes(progress["bytes_total"])
        rows.append(("loaded", f"{done} of {total} at {format_bytes(progress['bytes_per_s'])}/s{rest}"))
    versions = shown["versions"]
    rows.append(
        ("versions", f"ftd {versions['ftd']}, protocol {versions['protocol']}, torch {_text(versions['torch'])}")
    )
    return rows


def _segments(segments: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    placed = any(segment["node_bytes"] for segment in segments)
    for heading in ("SEGMENT", "BYTES", "PAGES", "HUGE", "PINNED", *(("NODES",) if placed else ())):
        table.add_column(heading)
    for segment in segments:
        size = segment["bytes"]
        nodes = (f"{node}: {_percent(count, size)}" for node, count in segment["node_bytes"].items())
        table.add_row(
            segment["name"],
            format_bytes(size),
            format_bytes(segment["page_bytes"]),
            _percent(segment["huge_bytes"], size),
            _percent(segment["pinned_bytes"], size),
            *((", ".join(nodes),) if placed else ()),
        )
    return table


def _followers(followers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("FOLLOWER", "STATE", "DEVICE", "GENERATION", "ATTACHED", "HEARTBEAT", "RESIDENT", "PIN"):
        table.add_column(heading)
    for follower in followers:
        resident = follower.get("resident_bytes")
        table.add_row(
            _text(follower["pid"]),
            follower["state"],
            _text(follower.get("device")),
            _text(follower.get("generation")),
            _seconds(follower.get("attached_s")),
            _seconds(follower.get("heartbeat_age_s")),
            "-" if resident is None else format_bytes(resident),
            _text(follower.get("pin")),
        )
    return table


def _print_troubles(console: Console, shown: Mapping[str, Any], prefix: str) -> None:
    failure = shown["failure"]
    if failure:
        console.print(Text(f"{prefix}{failure['message']}", style="red"), soft_wrap=True)
        if failure["remedy"]:
            console.print(Text(f"  → {failure['remedy']}"), soft_wrap=True)
    for warning in shown["warnings"]:
        console.print(Text(f"{prefix}warning: {warning}", style="yellow"), soft_wrap=True)


def _console() -> Console:
    # highlighting would colour digits inside names
    return Console(highlight=False, markup=False)


def _state(shown: Mapping[str, Any]) -> Text:
    if shown["state"] is None:
        return Text("?", style="dim")
    return Text(shown["state"], style=_COLOURS[State(shown["state"])])


def _percent(part: int, whole: int) -> str:
    """Rounded down: 100 % is all of it."""
    return f"{100 * part // max(1, whole)} %"


def _seconds(value: float | None) -> str:
    return "-" if value is None else format_seconds(value)


def _text(value: object) -> str:
    return "-" if value is None else str(value)
