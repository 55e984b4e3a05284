"""A plan, run for real: are the outputs the same, did every op run where it should, and does the clock agree?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from placewise import engines
from placewise.certificate import NO_CLAIM, Finding
from placewise.cluster import Cluster
from placewise.engines import Counted, Run
from placewise.errors import InvalidInput, Unsupported
from placewise.files import known_profiles, load_profile, profile_folder, save_profile
from placewise.measure import Timing, check_store, hardware_name, slug, timing_of
from placewise.plans import Plan
from placewise.profiles import OpTime, Profile
from placewise.simulator import simulate

#: How far outputs may differ from those of the model without a plan (see `difference`). Devices add up in another
#: order; whole numbers do not mind.
TOLERANCE: Final = {"float64": 1e-9, "float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}
#: Values of so many times the next smaller one tell nothing of how exact the others should be.
_OUTLIER: Final = 1e3
_WARM_UP, _LEAST, _MOST = 2, 3, 50  # rounds


@dataclass(frozen=True)
class Verification:
    """What a run of a plan showed."""

    plan: str  # its digest
    engine: str
    library: str
    plain: Timing  # the model without a plan
    placed: Timing  # as the plan says
    predicted: float  # seconds
    tolerance: Mapping[str, float]  # of the outputs, by dtype
    within: float  # how far the time may be off, as a share of what was predicted
    findings: tuple[Finding, ...]
    given: str = ""  # weights and inputs that it was run with

    @property
    def holds(self) -> bool:
        """Whether nothing that the plan claims was refuted."""
        return not any(finding.is_wrong for finding in self.findings)

    def facts(self) -> dict[str, Any]:
        """For JSON; seconds and bytes."""
        claims = [asdict(finding) for finding in self.findings]
        times = {"predicted": self.predicted, "placed": self.placed.seconds, "plain": self.plain.seconds}
        spread = {"placed_spread": self.placed.spread, "plain_spread": self.plain.spread}
        about = {"plan": self.plan, "engine": self.engine, "library": self.library, "holds": self.holds}
        about |= {"within": self.within, "tolerance": dict(self.tolerance), "given": self.given}
        return about | times | spread | {"findings": claims}


def engine_for(model: str) -> str:
    """The engine that runs such a model, where none is named."""
    if Path(model).is_dir():
        return "torch-offload"
    by_suffix = {".xml": "openvino", ".onnx": "onnxruntime", ".json": "torch-offload"}
    return by_suffix.get(Path(model).suffix.lower(), "torch")


def verify(
    plan: Plan,
    model: str,
    *,
    engine: str | None = None,
    devices: Mapping[str, str] | None = None,
    seconds: float = 10.0,
    within: float = 0.15,
    keep: Callable[[Cluster], None] | None = None,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Verification:
    """Run a model (of the zoo, or a file) with and without a plan, in turn, for about so many seconds.

    `within` is how far the measured time may be from the predicted one, as a share of it. `keep` is given the plan's
    cluster with what was measured: each device that ran ops has a profile of them, which goes into the store.
    """
    name = engine or engine_for(model)
    found = engines.get(name)
    if found.run is None:
        able = ", ".join(other.name for other in engines.available().values() if other.run)
        raise Unsupported(f"{name} cannot be run from here; {able} can")
    if keep:
        _check_stand_ins(plan, devices or {})
        check_store(profile_folder())
    on_progress("making it ready")
    with found.run(plan, model, devices or {}) as run:
        links = run.links()
        expected, outputs = (_read(made) for made in (run.plain(), run.placed()))
        plain, placed = _in_turn(run, seconds, on_progress)
        predicted = _one_run(plan)
        tolerance = {dtype: _tolerance(plan, dtype) for dtype, _ in expected}
        findings = (
            _outputs(expected, outputs, tolerance),
            _placement(plan, run.ran_on()),
            *_links(links),
            _time(plan, predicted, placed, within),
            *_busy(plan, run.busy()),
            *_memory(plan, run.peak()),
        )
        if keep:
            on_progress("measuring its ops")
            keep(with_profiles(plan, run))
    return Verification(
        plan.digest, name, run.library, plain, placed, predicted, tolerance, within, findings, run.given
    )


def _in_turn(run: Run, seconds: float, on_progress: Callable[[str], None]) -> tuple[Timing, Timing]:
    """Medians of both, interleaved, also with runs that clock ops: what disturbs the machine disturbs all alike."""
    plain: list[float] = []
    placed: list[float] = []
    for _ in range(_WARM_UP - 1):  # once they have run already
        run.plain(), run.placed()
    stop = time.perf_counter() + seconds
    while len(placed) < _LEAST or (len(placed) < _MOST and time.perf_counter() < stop):
        for call, samples in ((run.plain, plain), (run.placed, placed)):
            began = time.perf_counter()
            call()
            samples.append(time.perf_counter() - began)
        run.clocked()
        on_progress(f"run {len(placed)}")
    return timing_of(plain), timing_of(placed)


def _one_run(plan: Plan) -> float:
    """The predicted seconds of one run by itself, whatever the plan's objective is."""
    if plan.problem.objective == "latency":
        return plan.value
    return simulate(replace(plan.problem, objective="latency"), plan.placement, plan.order).value


# ---- claims ----------------------------------------------------------------------------------------------------------


def _read(outputs: Sequence[ArrayLike]) -> list[tuple[str, NDArray[Any]]]:
    """Each with its dtype, which NumPy may not have."""
    return [(str(getattr(out, "dtype", None) or np.asarray(out).dtype), np.asarray(out)) for out in outputs]


def _tolerance(plan: Plan, dtype: str) -> float:
    """That of an output: of its own dtype or, where that is coarser, of the one that most of the model computes in."""
    if dtype.startswith(("int", "uint", "bool")):
        return 0.0
    graph = plan.problem.graph
    work: dict[str, float] = {}
    for used, flops in zip(graph.op_dtypes, graph.flops.tolist(), strict=True):
        work[used] = work.get(used, 0.0) + flops
    usual = max(work, key=work.__getitem__, default="")
    return max(TOLERANCE.get(dtype, max(TOLERANCE.values())), TOLERANCE.get(usual, 0.0))


def _outputs(
    expected: Sequence[tuple[str, NDArray[Any]]],
    found: Sequence[tuple[str, NDArray[Any]]],
    tolerance: Mapping[str, float],
) -> Finding:
    """Of the output that is the least as it should be."""
    if [(dtype, out.shape) for dtype, out in expected] != [(dtype, out.shape) for dtype, out in found]:
        return Finding("outputs", None, None, "they have other shapes or dtypes")
    worst = Finding("outputs", None, 0.0, "holds" if expected else "there are none")
    share = -1.0
    for (dtype, plain), (_, placed) in zip(expected, found, strict=True):
        allowed = tolerance[dtype]
        if plain.dtype.kind in "fc" and np.isnan(plain).any():  # that they are alike says nothing
            return Finding("outputs", allowed, None, "NaN without a plan, too")
        error = difference(plain, placed) if allowed else float(np.mean(plain != placed)) if plain.size else 0.0
        used = error / allowed if allowed else np.inf if error else 0.0
        if used > share:
            share = used
            worst = Finding("outputs", allowed, error, "holds" if error <= allowed else f"they differ ({dtype})")
    return worst


def difference(expected: NDArray[Any], found: NDArray[Any]) -> float:
    """The largest difference, each as a share of the value or, of smaller ones, of the largest that is no outlier.

    It is infinite where only one of the two is no number.
    """
    a, b = (np.asarray(values, np.float64).ravel() for values in (expected, found))
    odd = ~np.isfinite(a)
    if not np.array_equal(a[odd], b[odd], equal_nan=True) or not np.isfinite(b[~odd]).all():
        return np.inf
    size = np.abs(a[~odd])
    upper = np.sort(size[size > 0])
    upper = upper[len(upper) // 2 :]
    leaps = np.flatnonzero(upper[1:] > _OUTLIER * upper[:-1])
    scale = float(upper[leaps[0] if len(leaps) else -1]) if len(upper) else 1.0
    return float((np.abs(a - b)[~odd] / np.maximum(size, scale)).max(initial=0.0))


def _placement(plan: Plan, ran_on: Mapping[str, str]) -> Finding:
    graph = plan.problem.graph
    told = [op for op, name in enumerate(graph.op_names) if name in ran_on and not graph.is_stored[op]]
    astray = [op for op in told if ran_on[graph.op_names[op]] != plan.devices[graph.op_names[op]]]
    wanted = float(len(told))
    if not astray:
        return Finding("placement", wanted, wanted, "holds" if told else "the engine tells of none")
    name = graph.op_names[astray[0]]
    more = f" (and {len(astray) - 1} more)" if len(astray) > 1 else ""
    return Finding("placement", wanted, float(len(told) - len(astray)), f"{name} ran on {ran_on[name]}{more}")


def _links(links: Mapping[tuple[str, str], bool]) -> list[Finding]:
    return [
        Finding(f"link {source} to {target}", None, None, "holds" if works else "bytes change on the way")
        for (source, target), works in links.items()
    ]


def _time(plan: Plan, predicted: float, measured: Timing, within: float) -> Finding:
    off = measured.seconds / predicted - 1 if predicted > 0 else np.inf
    verdict = "holds" if abs(off) <= within else f"{off:+.0%}, over {within:.0%}"
    claim = "time" if plan.problem.objective == "latency" else "time of one run"
    return Finding(claim, predicted, measured.seconds, verdict)


def _busy(plan: Plan, busy: Mapping[str, float]) -> list[Finding]:
    """What each device computed for: the reason why a time does or does not hold, and no claim of the plan's."""
    predicted = dict(zip(plan.problem.cluster.device_names, plan.timeline.busy.tolist(), strict=True))
    return [Finding(f"busy {name}", predicted[name], seconds, NO_CLAIM) for name, seconds in busy.items()]


def _memory(plan: Plan, peak: Mapping[str, float]) -> list[Finding]:
    cluster = plan.problem.cluster
    predicted = dict(zip(cluster.device_names, plan.timeline.peak.tolist(), strict=True))
    limit = {device.name: device.memory for device in cluster.devices}
    return [
        Finding(f"memory of {name}{' (counted)' * isinstance(held, Counted)}", predicted[name], float(held),
                "holds" if held <= limit[name] else "more than there is")
        for name, held in peak.items()
    ]  # fmt: skip


# ---- what was measured, for the next plan ----------------------------------------------------------------------------


def _check_stand_ins(plan: Plan, devices: Mapping[str, str]) -> None:
    for device in plan.problem.cluster.devices:
        place = devices.get(device.name, "")
        if device.kind != "cpu" and place.lower().startswith("cpu"):
            raise InvalidInput(
                f"{device.name} is a {device.kind}, and {place} stands in for it: its times say nothing about it, so "
                "they are not kept; verify without --update"
            )


def with_profiles(plan: Plan, run: Run) -> Cluster:
    """The cluster with a profile for each device that ran something; profiles add to what was measured before."""
    graph, cluster = plan.problem.graph, plan.problem.cluster
    index = {signature: op for op, signature in enumerate(graph.op_signatures)}
    by_device: dict[str, dict[str, OpTime]] = {}
    for where, signature, timing in run.times():
        op = index[signature]
        by_device.setdefault(where, {})[signature] = OpTime(
            graph.op_kinds[op], graph.op_dtypes[op], float(graph.flops[op]), float(graph.bytes_accessed[op]), *timing
        )
    made = []
    for device in cluster.devices:
        name = slug(f"{cluster.name} {device.name} {run.library}")
        known = known_profiles().get(name)
        before = load_profile(known) if known else None
        if device.name in by_device:
            about = (name, device.name, hardware_name(), run.library, date.today().isoformat())
            after = Profile(*about, {**(before.ops if before else {}), **by_device[device.name]})
            save_profile(after, profile_folder() / f"{name}.json.gz")
            device = replace(device, profile=after)
        elif before:
            device = replace(device, profile=before)
        made.append(device)
    return replace(cluster, devices=tuple(made))
