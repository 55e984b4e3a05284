"""How good the costs are: whole models against the sum of their measured ops, and against predictions for models whose
ops were left out of the fit. Reads the profiles that come with Placewise and those of this machine. For the machine
that both profiles and datasheets describe, the roofline model of the datasheets stands beside them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from harness import main
from placewise import files, zoo
from placewise.costs.estimate import estimate
from placewise.profiles import Profile


def predicted(profile: Profile, model: str) -> float:
    """Seconds, by rates fitted without this model's ops and its whole time."""
    graph = zoo.load(model)
    works = ~graph.is_stored & ((graph.flops > 0) | (graph.bytes_accessed > 0))
    ops = np.flatnonzero(works).tolist()
    kinds, dtypes = [graph.op_kinds[i] for i in ops], [graph.op_dtypes[i] for i in ops]
    fitted = profile.without(graph.op_signatures, [model])
    times = fitted.predict(kinds, dtypes, graph.flops[works], graph.bytes_accessed[works])
    return float(times.sum() * fitted.overhead(model))


def by_datasheet(name: str, model: str) -> float | None:
    """Seconds, by the roofline of the catalogue's entry for the machine of a profile that comes with Placewise."""
    box = files.load_cluster("h200-16-cores")
    for device in box.devices:
        if device.profile and device.profile.name == name:
            plain = replace(box, devices=tuple(replace(d, profile=None) for d in box.devices))
            return float(estimate(zoo.load(model), plain).seconds[:, box.device_index(device.name)].sum())
    return None


def measure(options: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name in options.profile or files.known_profiles():
        profile = files.load_profile(name)
        of_profile = []
        for model, whole in profile.models.items():
            if model in zoo.names():
                guess, roof = predicted(profile, model), by_datasheet(profile.name, model)
                of_profile.append(
                    {
                        "profile": profile.name[:24],
                        "model": model,
                        "whole ms": whole.seconds * 1e3,
                        "sum of ops ms": whole.sum_of_ops * 1e3,
                        "sum/whole": whole.sum_of_ops / whole.seconds,
                        "predicted ms": guess * 1e3,
                        "error": guess / whole.seconds - 1,
                        "datasheet's error": roof / whole.seconds - 1 if roof else "",
                    }
                )
        if of_profile:
            close = sum(abs(row["sum/whole"] - 1) <= 0.15 for row in of_profile)
            of_profile.append(
                {
                    "profile": profile.name[:24],
                    "model": f"MEDIAN ({close} sums within 15 %)",
                    "sum/whole": float(np.median([row["sum/whole"] for row in of_profile])),
                    "error": float(np.median([abs(row["error"]) for row in of_profile])),
                    "datasheet's error": _median_size(row["datasheet's error"] for row in of_profile),
                }
            )
        rows += of_profile
    return rows


def _median_size(values: Iterable[Any]) -> Any:
    sizes = [abs(value) for value in values if value != ""]
    return float(np.median(sizes)) if sizes else ""


if __name__ == "__main__":
    main("Costs: whole models, measured and predicted", measure, profile={"action": "append", "help": "only these"})
