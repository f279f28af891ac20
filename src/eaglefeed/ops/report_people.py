"""Who worked on a run and what happened when, from the snapshots and facts of its journal."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eaglefeed.ops.report_panels import accept_length, recent_accuracies
from eaglefeed.ops.report_values import mapping, number, sequence, text, tidied, whole
from eaglefeed.ops.series import is_alive, moment
from eaglefeed.ops.wording import count
from eaglefeed.queue.base import MAIN_GROUP
from eaglefeed.queue.journal import WorkerView

__all__ = ["producers", "timeline", "trainers", "workers"]


def workers(found: Iterable[WorkerView], now_s: float) -> list[dict[str, Any]]:
    """A line a worker, those that came first in front."""
    lines = [_worker(each, now_s) for each in found]
    return sorted(lines, key=lambda line: (line["started_s"] or line["seen_s"], line["name"]))


def _worker(view: WorkerView, now_s: float) -> dict[str, Any]:
    started_s = moment(view.values.get("started_s"))
    return {
        "role": view.role,
        "name": view.name,
        "host": text(view.values, "host"),
        "state": text(view.values, "state"),
        "started_s": started_s,
        "seen_s": view.at_s,
        "lived_s": max(0.0, view.at_s - started_s) if started_s is not None else None,
        "has_ended": text(view.values, "state").startswith("ended"),
        "is_alive": is_alive(view, now_s),
        "versions": {name: str(each) for name, each in mapping(view.values, "versions").items()},
        "values": tidied(view.values),
    }


def producers(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The sums over all producers, and the shares of their time that they waited for room and for the writer."""
    of_them = [line for line in lines if line["role"] == "producer"]
    return _summed(of_them, ("produced", "num_tokens", "num_bytes"), ("paused_s", "write_wait_s"))


def trainers(lines: Sequence[Mapping[str, Any]], series: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same of each group's trainers, which wait for data, with what the newest of them told last.

    Their accuracies are means over the group's last points, where there are any.
    """
    of_them = [line for line in lines if line["role"] == "trainer"]
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(of_them, key=lambda line: float(line["seen_s"])):
        groups.setdefault(text(line["values"], "group") or MAIN_GROUP, []).append(line)
    return [
        {"group": group, **_trained(members, recent_accuracies(series, group))}
        for group, members in sorted(groups.items())
    ]


def _trained(lines: Sequence[Mapping[str, Any]], recent: Sequence[float]) -> dict[str, Any]:
    told = lines[-1]["values"]
    accuracies = recent or [value for value in sequence(told, "accuracies") if isinstance(value, int | float)]
    newest = {name: number(told, name) for name in ("step", "epoch", "loss", "step_s", "world_size")}
    estimate = accept_length(accuracies) if accuracies else None
    sums = _summed(lines, ("delivered", "acked", "num_steps"), ("wait_s",))
    return {**sums, **newest, "accuracies": accuracies, "accept_length_estimate": estimate}


def _summed(lines: Sequence[Mapping[str, Any]], counts: Sequence[str], waits: Sequence[str]) -> dict[str, Any]:
    """Counts and seconds over some workers; a share of their time for each wait, where that is known."""
    values = [line["values"] for line in lines]
    lived_s = sum(line["lived_s"] or 0.0 for line in lines)
    sums: dict[str, Any] = {"workers": len(lines), "lived_s": lived_s}
    sums |= {name: sum(whole(each, name) for each in values) for name in counts}
    sums |= {name: sum(number(each, name) or 0.0 for each in values) for name in waits}
    shares = {name.removesuffix("_s"): min(1.0, sums[name] / lived_s) if lived_s else None for name in waits}
    return sums | {f"{name}_share": share for name, share in shares.items()}


def timeline(lines: Sequence[Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What happened once, the earliest first."""
    events = [event for line in lines for event in _comings(line)]
    events += [event for name, fact in facts.items() if (event := _fact(name, fact))]
    return sorted(events, key=lambda event: float(event["at_s"]))


def _comings(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    who = f"{line['role']} {line['name']}"
    events = [] if line["started_s"] is None else [{"at_s": line["started_s"], "what": f"{who} started"}]
    if line["has_ended"]:
        events.append({"at_s": line["seen_s"], "what": f"{who} ended"})
    elif not line["is_alive"]:
        events.append({"at_s": line["seen_s"], "what": f"{who} was last heard of"})
    return events


def _fact(name: str, fact: Mapping[str, Any]) -> dict[str, Any] | None:
    at_s = number(fact, "at_s")
    kind = name.partition(":")[0]
    if at_s is None:
        return None
    if kind == "feed":
        return {"at_s": at_s, "what": _fed(fact)}
    if kind == "export":
        group, step = text(fact, "group") or MAIN_GROUP, count(whole(fact, "step"))
        return {"at_s": at_s, "what": f"trainers of group {group} exported the draft of step {step}"}
    if kind == "evaluation":
        return {"at_s": at_s, "what": "the draft was evaluated"}
    return {"at_s": at_s, "what": f"noted: {name}"}


def _fed(fact: Mapping[str, Any]) -> str:
    path, rejected = text(fact, "path") or "conversations", whole(fact, "rejected")
    if refused := text(fact, "refused"):
        return f"feed of {path} was refused: {refused}"
    told = f", {count(rejected)} rows rejected" if rejected else ""
    return f"fed {path}: {count(whole(fact, 'queued'))} new items{told}"
