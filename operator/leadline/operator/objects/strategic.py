"""Strategic merge patch, as far as pod templates need it.

Pure. As in Kubernetes: maps merge, null deletes, lists of named things merge by their key,
other lists are replaced; `$patch: delete` in a map or an item removes it (kubectl apply drops nulls, this it
keeps), `$patch: replace` in a map or as a list's item replaces the whole. Volumes keep only the source that
the patch names (`retainKeys`). The order of a list stays, new items come last.
"""

from __future__ import annotations

from typing import Any

__all__ = ["misshapen", "strategic_merge"]

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
_MAPS = {"metadata", "spec", "labels", "annotations", "securityContext", "resources", "requests", "limits"}
_RETAIN = {"volumes"}
"""Lists whose items are unions: an item that names a member of the union replaces the old one."""


def misshapen(patch: dict[str, Any], path: str) -> str:
    """A sentence on the first field that is no map or no list of maps although its name wants one; empty:
    there is none. `path`: where the patch stands."""
    for name, value in patch.items():
        at = f"{path}.{name}"
        if value is None or (isinstance(value, dict) and "$patch" in value):
            continue
        if name in _MAPS and not isinstance(value, dict):
            return f"{at} must be a map"
        if name in _KEYS and not (
            isinstance(value, list) and all(_has_key(item, _KEYS[name]) for item in value)
        ):
            return f"{at} must be a list of maps, each with {_KEYS[name]}"
        items = enumerate(value) if isinstance(value, list) else [(None, value)]
        for number, item in items:
            if isinstance(item, dict) and (
                found := misshapen(item, at if number is None else f"{at}[{number}]")
            ):
                return found
    return ""


def _has_key(item: Any, key: str) -> bool:
    return isinstance(item, dict) and ("$patch" in item or isinstance(item.get(key), str | int))


def strategic_merge(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`base` with `patch` over it; neither is changed."""
    if patch.get("$patch") == "replace":
        return {name: value for name, value in patch.items() if name != "$patch"}
    result = dict(base)
    for name, value in patch.items():
        if value is None or (isinstance(value, dict) and value.get("$patch") == "delete"):
            result.pop(name, None)
        elif isinstance(value, dict):
            old = result.get(name)
            result[name] = strategic_merge(old if isinstance(old, dict) else {}, value)
        elif isinstance(value, list) and name in _KEYS:
            old = result.get(name)
            result[name] = _merge_list(old if isinstance(old, list) else [], value, name)
        else:
            result[name] = value
    return result


def _merge_list(base: list[Any], patch: list[Any], field: str) -> list[Any]:
    key = _KEYS[field]
    if {"$patch": "replace"} in patch:
        return [item for item in patch if item != {"$patch": "replace"}]
    merged: dict[Any, Any] = {item.get(key): item for item in base}
    for item in patch:
        name = item.get(key)
        if item.get("$patch") == "delete":
            merged.pop(name, None)
        elif (field in _RETAIN and len(item) > 1) or (
            field == "env" and ("valueFrom" in item or "value" in item)
        ):
            merged[name] = strategic_merge({}, item)
        else:
            merged[name] = strategic_merge(merged.get(name, {}), item)
    return list(merged.values())
