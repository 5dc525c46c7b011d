"""Why a pod does not serve, read from its status: one finding a pod, and the one of several that matters
most.

Pure. Sources: core/v1 PodStatus; reasons of waiting containers are the kubelet's
(ErrImagePull, ImagePullBackOff, CrashLoopBackOff, CreateContainerConfigError, …); the scheduler writes why a
pod cannot be placed into the condition PodScheduled. Why the engine ended is its termination message: a typed
error by name (`isvc_termination`), or, where the process could not write it, the end of its log.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from leadline.operator.names import CONTAINER, DOWNLOAD_CONTAINER
from leadline.operator.planning.observed import StartReport
from leadline.protocol.isvc import Reason
from leadline.protocol.isvc_termination import read_termination

__all__ = [
    "Finding",
    "diagnose_pod",
    "diagnose_refused",
    "is_being_set_up",
    "is_ready",
    "lacks_secret",
    "last_eviction",
    "template_of",
    "waits_for_claims",
    "worst",
]

_MAX_MESSAGE = 512
_CLAIMS = re.compile(r"PersistentVolume|binding volumes|persistent volumes", re.I)

_PULL = {
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
}
_CONFIG = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "StartError"}

# The engine's typed errors (engine/errors.py) by name; what is not here (EngineDead, a KeyError) is a crash.
_TYPES = {
    "Unauthorized": Reason.UNAUTHORIZED,
    "ModelNotFound": Reason.MODEL_NOT_FOUND,
    "ModelUnreachable": Reason.MODEL_UNREACHABLE,
    "UnsupportedModel": Reason.MODEL_UNSUPPORTED,
    "OutOfMemory": Reason.OUT_OF_MEMORY,
    "ConfigError": Reason.CONFIG_ERROR,
}
# Above 128 an exit code is 128 plus the signal that ended the process (POSIX shells, and container runtimes
# after them); 126 and 127 are the runtime's own.
_EXIT_CODES = {126: "its command cannot be run", 127: "its command is not in the image"}
_SIGNALS = {
    signal.SIGKILL: "killed from outside: the node ran out of memory, or the container did not stop in time, "
    "after its liveness probe had failed for one. `kubectl describe pod` has the Events",
    signal.SIGTERM: "told to stop",
    signal.SIGSEGV: "a crash in native code",
    signal.SIGABRT: "native code gave up, as for a failed check or want of memory",
    signal.SIGBUS: "as where a volume or /dev/shm is full",
    signal.SIGILL: "its CPU lacks an instruction that the image uses",
}

_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|do(es)? not fit|not enough (GPU )?memory|Cannot allocate memory", re.I
)

# For images that do not write their error's name: what its sentences say. First match wins.
_SENTENCES: tuple[tuple[Reason, re.Pattern[str]], ...] = (
    (
        Reason.UNAUTHORIZED,
        re.compile(r"is gated: ask for access|refused the token|private to another account"),
    ),
    (
        Reason.MODEL_UNREACHABLE,
        re.compile(
            r"the hub cannot be reached|the hub answered HTTP (5\d\d|429|408)|the download of \S+ broke off"
        ),
    ),
    (
        Reason.MODEL_NOT_FOUND,
        re.compile(
            r"does not exist on the hub|has no revision|no model at |is no model folder|is not a scheme|"
            r"is no hub address|has no config\.json|has no \*\.safetensors|local cache|"
            r"no folder '|no model '|a model is a folder|the hub answered HTTP"
        ),
    ),
    (Reason.OUT_OF_MEMORY, _OUT_OF_MEMORY),
    # argparse, of an argument that this engine does not know (without its `leadline: `), or of its value
    (Reason.CONFIG_ERROR, re.compile(r"^(leadline serve: )?error: ")),
    (Reason.MODEL_UNSUPPORTED, re.compile(r"architecture|is not supported|unsupported", re.I)),
)

_ORDER = [
    Reason.UNAUTHORIZED,
    Reason.MODEL_NOT_FOUND,
    Reason.MODEL_UNSUPPORTED,
    Reason.CONFIG_ERROR,
    Reason.OUT_OF_MEMORY,
    Reason.IMAGE_PULL_FAILED,
    Reason.CONFIG_FAILED,
    Reason.POD_SETUP_FAILED,
    Reason.PODS_REFUSED,
    Reason.MODEL_UNREACHABLE,
    Reason.CRASH_LOOP,
    Reason.NOT_RESPONDING,
    Reason.INSUFFICIENT_GPU,
    Reason.UNSCHEDULABLE,
    Reason.DOWNLOADING,
    Reason.LOADING_WEIGHTS,
    Reason.CREATING_PODS,
]
"""What a person must act on comes first, what passes by itself last."""


@dataclass(slots=True, frozen=True)
class Finding:
    reason: Reason
    message: str
    pod: str = ""

    @property
    def is_failure(self) -> bool:
        return self.reason not in (Reason.DOWNLOADING, Reason.LOADING_WEIGHTS, Reason.CREATING_PODS)

    @property
    def may_pass(self) -> bool:
        """Whether the kubelet's next try may succeed without a change in the cluster."""
        return self.reason in (Reason.MODEL_UNREACHABLE, Reason.POD_SETUP_FAILED)


def worst(findings: list[Finding]) -> Finding | None:
    """The finding that a person should read first; of equals, the first pod's."""
    return min(findings, key=lambda finding: (_ORDER.index(finding.reason), finding.pod), default=None)


def is_ready(pod: dict[str, Any]) -> bool:
    return _condition(pod, "Ready").get("status") == "True"


def diagnose_pod(
    pod: dict[str, Any], resource_name: str, report: StartReport | None = None, event: str = ""
) -> Finding | None:
    """Return why `pod` is not ready; None if it is ready. `report`: its last own report. `event`: the newest
    warning Event about its volumes or its network."""
    if is_ready(pod):
        return None
    name = str(pod["metadata"]["name"])
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False" or (event and not scheduled):
        words = [str(scheduled.get("message", "")), event if waits_for_claims(pod) else ""]
        return _unscheduled(name, "; ".join(filter(None, words)), resource_name)
    status = pod.get("status", {})
    containers = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    for container in containers:
        finding = _diagnose_container(name, container)
        if finding is not None:
            return finding
    running = {one.get("name"): one for one in containers if "running" in one.get("state", {})}
    if DOWNLOAD_CONTAINER in running:
        said = _progress(report) if report is not None and report.phase else ""
        return Finding(Reason.DOWNLOADING, f"{name}: {said or 'the download begins'}", name)
    if (engine := running.get(CONTAINER)) is not None:
        # A pod that was ready turned unready after its container had started; one that loads, before.
        turned = str(_condition(pod, "Ready").get("lastTransitionTime", ""))
        said = "" if report is None else report.message
        if engine.get("started") and turned > str(engine["state"]["running"].get("startedAt", "")):
            said = _short(_silent_node(pod, engine) or said or "it does not answer /ready")
            text = f"{name}: was ready and is no longer: {said}"
            return Finding(Reason.NOT_RESPONDING, text, name)
        phase = "" if report is None else report.phase
        reason = Reason.DOWNLOADING if phase == "downloading" else Reason.LOADING_WEIGHTS
        said = "" if report is None else _progress(report)
        return Finding(reason, f"{name}: {said or 'the engine is starting'}", name)
    text = "its containers are being made"
    if is_being_set_up(pod):
        if event:
            return Finding(Reason.POD_SETUP_FAILED, f"{name}: {_short(event)}; it is tried again", name)
        text = "its volumes and network are not ready yet; `kubectl describe pod` says what they wait for"
    return Finding(Reason.CREATING_PODS, f"{name}: {text}", name)


def _silent_node(pod: dict[str, Any], engine: dict[str, Any]) -> str:
    """Return the message for a pod that the control plane made unready because its node no longer reports:
    the container is ready in the kubelet's last report. Empty if the kubelet itself made it unready."""
    if not engine.get("ready") or _condition(pod, "Ready").get("reason") == "ReadinessGatesNotReady":
        return ""
    node = pod.get("spec", {}).get("nodeName", "")
    return f"its node {node} no longer reports: `kubectl describe node {node}`"


def lacks_secret(pod_events: Iterable[str], name: str) -> bool:
    """Whether one of the `pod_events` of pods is that a Secret of that name is missing."""
    return any(f'secret "{name}" not found' in one for one in pod_events)


def is_being_set_up(pod: dict[str, Any]) -> bool:
    """Whether a pod has a node and does not have its volumes and its network yet. Only Events
    tell the cause, such as a claim that another node holds."""
    return _condition(pod, "PodReadyToStartContainers").get("status") == "False"


def waits_for_claims(pod: dict[str, Any]) -> bool:
    """Whether a pod has no node, possibly because of its claims; only Events tell why a claim has no volume.
    While a volume is being provided for the node that was found, there is no condition yet."""
    scheduled = _condition(pod, "PodScheduled")
    if not scheduled:
        return bool(pod.get("status", {}).get("phase") == "Pending")
    return scheduled.get("status") == "False" and bool(_CLAIMS.search(str(scheduled.get("message", ""))))


_ADMISSION = re.compile(
    "OutOf(?P<resource>.+)|TopologyAffinityError|UnexpectedAdmissionError|SMTAlignmentError|NodeAffinity"
)
"""Reasons of a pod that the kubelet turned down: it is Failed without having run, and the ReplicaSet makes
another at once."""
_LATELY = timedelta(minutes=1)


def diagnose_refused(pods: list[dict[str, Any]], resource_name: str) -> Finding | None:
    """Why nodes turn the newest of `pods` down, although the scheduler finds them a place: their Topology
    Manager asks for GPUs of one NUMA node, a device has failed. None unless the newest of those that were
    turned down is of the newest pod's template and not much older. It names the first of them: the sentence
    stays while pods come and go."""
    pods = sorted(pods, key=lambda pod: (_created(pod), str(pod["metadata"]["name"])))
    refused = [
        pod
        for pod in pods
        if pod.get("status", {}).get("phase") == "Failed"
        and _ADMISSION.fullmatch(str(pod["status"].get("reason", "")))
        and template_of(pod) == template_of(pods[-1])
    ]
    if not refused or _created(pods[-1]) - _created(refused[-1]) > _LATELY:
        return None
    name, status = str(refused[0]["metadata"]["name"]), refused[0]["status"]
    match = _ADMISSION.fullmatch(status["reason"])
    lacks = match is not None and match["resource"] == resource_name
    text = f"{name}: its node turned it down: {status['reason']}: {_short(status.get('message', ''))}"
    return Finding(Reason.INSUFFICIENT_GPU if lacks else Reason.UNSCHEDULABLE, text, name)


def last_eviction(pods: list[dict[str, Any]]) -> str:
    """Why the kubelet evicted the last pod of the newest template that it did (want of disk, …); empty:
    it evicted none. The next pod may well share its fate."""
    pods = sorted(pods, key=lambda pod: (_created(pod), str(pod["metadata"]["name"])))
    evicted = [
        pod
        for pod in pods
        if pod.get("status", {}).get("phase") == "Failed"
        and pod["status"].get("reason") == "Evicted"
        and template_of(pod) == template_of(pods[-1])
    ]
    if not evicted:
        return ""
    return (
        f"{evicted[-1]['metadata']['name']} was evicted: {_short(evicted[-1]['status'].get('message', ''))}"
    )


def _created(pod: dict[str, Any]) -> datetime:
    return datetime.fromisoformat(pod["metadata"].get("creationTimestamp") or "2000-01-01T00:00:00Z")


def template_of(pod: dict[str, Any]) -> str:
    """Hash of the template that a ReplicaSet made `pod` from; empty: it was made otherwise."""
    return str((pod["metadata"].get("labels") or {}).get("pod-template-hash", ""))


def _condition(pod: dict[str, Any], kind: str) -> dict[str, Any]:
    conditions = pod.get("status", {}).get("conditions") or []
    return next((one for one in conditions if one.get("type") == kind), {})


def _unscheduled(name: str, message: str, resource_name: str) -> Finding:
    if f"Insufficient {resource_name}" in message:
        return Finding(
            Reason.INSUFFICIENT_GPU,
            f"{name}: no node has enough free {resource_name}: {_short(message)}",
            name,
        )
    return Finding(Reason.UNSCHEDULABLE, f"{name}: {_short(message)}", name)


def _diagnose_container(pod: str, container: dict[str, Any]) -> Finding | None:
    """None for a container about which nothing is wrong so far."""
    state = container.get("state", {})
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "")
    if reason in _PULL:
        text = waiting.get("message") or reason
        return Finding(
            Reason.IMAGE_PULL_FAILED, f"{pod}: image {container.get('image')}: {_short(text)}", pod
        )
    if reason in _CONFIG:
        return Finding(Reason.CONFIG_FAILED, f"{pod}: {_short(waiting.get('message') or reason)}", pod)
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated")
    if not ended or ended.get("exitCode") == 0:
        # Ended well: an init container that is done, or an engine that received SIGTERM.
        if reason == "CrashLoopBackOff":
            return Finding(
                Reason.CRASH_LOOP, f"{pod}: the container {container['name']} ends again and again", pod
            )
        return None
    # A container that runs again after a crash is still the container that crashed, until it is ready: so the
    # reason stays put while the kubelet restarts it.
    message = str(ended.get("message", ""))
    if ended.get("reason") == "OOMKilled":
        return Finding(
            Reason.OUT_OF_MEMORY, f"{pod}: {container['name']} was killed at its memory limit", pod
        )
    typed = read_termination(message)
    said = typed.message if typed is not None else _last_line(message)
    known = _TYPES.get(typed.reason) if typed is not None else None
    if known is None:
        # An error without a type of ours may still be the GPU's, which torch words.
        sentences = _SENTENCES if typed is None else [(Reason.OUT_OF_MEMORY, _OUT_OF_MEMORY)]
        known = next((reason for reason, pattern in sentences if pattern.search(said)), None)
    if known is Reason.MODEL_UNREACHABLE:
        return Finding(known, f"{pod}: {_short(said)}; it is tried again", pod)
    if known is not None:
        return Finding(known, f"{pod}: {_short(said)}", pod)
    text = f"{pod}: {container['name']} {_how_it_ended(int(ended.get('exitCode') or 0))}"
    return Finding(Reason.CRASH_LOOP, f"{text}: {_short(said)}" if said else text, pod)


def _last_line(message: str) -> str:
    """The line that `leadline` ends with when it fails, else the last one that says anything."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("leadline: ")]
    return (ours or lines or [""])[-1].removeprefix("leadline: ")


def _progress(report: StartReport) -> str:
    """As in "loading weights: 3.2 of 15.3 GB (21 %)"."""
    if not report.phase:
        return _short(report.message.removeprefix("not ready: "))
    text = f"{report.phase}: {report.detail}" if report.detail else report.phase
    return _short(text if report.fraction is None else f"{text} ({int(report.fraction * 100)} %)")


def _short(text: str) -> str:
    text = " ".join(str(text).split())
    return text if len(text) <= _MAX_MESSAGE else text[: _MAX_MESSAGE - 1] + "…"


def _how_it_ended(code: int) -> str:
    """Explain an exit code, as in "ended with exit code 137 (SIGKILL: killed from outside: …)"."""
    text = f"ended with exit code {code}"
    if code in _EXIT_CODES:
        return f"{text} ({_EXIT_CODES[code]})"
    if not 128 < code < 128 + signal.NSIG:
        return text
    try:
        number = signal.Signals(code - 128)
    except ValueError:
        return f"{text} (signal {code - 128})"
    why = _SIGNALS.get(number)
    return f"{text} ({number.name}: {why})" if why else f"{text} ({number.name})"
