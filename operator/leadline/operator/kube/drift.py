"""Decides whether an object differs from what we want; a steady state causes no writes (P1).

Pure but for the memory of `AppliedFields`. An object is applied when

    it does not exist
    its annotation has another hash: the desired state has changed, or an older operator applied it
    a field of ours no longer has our value: another client changed it

The last case needs care: the API server may store a value in another form ("1024Mi" as "1Gi"), and a plain
comparison would then apply the object again and again. So the answer to each apply is kept, cut to our
fields, and a live object that differs from ours is compared with that answer.
"""

from __future__ import annotations

from typing import Any

from leadline.operator.names import HASH_ANNOTATION

__all__ = ["AppliedFields", "covers", "projection"]

Object = dict[str, Any]
_KEYS = ("name", "containerPort", "port", "mountPath", "topologyKey", "uid", "ip")


class AppliedFields:
    """Our fields of the objects of one service in the form in which the API server stored them. A restart
    loses them, which costs one apply of each object with such fields."""

    def __init__(self) -> None:
        self._applied: dict[tuple[str, str], tuple[str, str, Any]] = {}
        """(kind, name) → (uid, hash applied, projection of the answer)."""

    def must_apply(self, wanted: Object, live: Object | None) -> bool:
        if live is None:
            return True
        applied = (live["metadata"].get("annotations") or {}).get(HASH_ANNOTATION)
        desired = wanted["metadata"]["annotations"][HASH_ANNOTATION]
        if applied != desired:
            return True
        if covers(wanted, live):
            return False
        stored = self._applied.get(_name(wanted))
        return stored is None or stored != (live["metadata"]["uid"], desired, projection(wanted, live))

    def remember(self, wanted: Object, answer: Object) -> None:
        desired = wanted["metadata"]["annotations"][HASH_ANNOTATION]
        if covers(wanted, answer):
            self._applied.pop(_name(wanted), None)
        else:
            self._applied[_name(wanted)] = answer["metadata"]["uid"], desired, projection(wanted, answer)

    def forget(self, item: Object) -> None:
        self._applied.pop(_name(item), None)


def _name(item: Object) -> tuple[str, str]:
    return item["kind"], item["metadata"]["name"]


def covers(wanted: Any, live: Any) -> bool:
    """Whether `live` has every field of `wanted` at its value. An empty map or list, or an empty text, may be
    absent: the API server leaves them out."""
    if isinstance(wanted, dict):
        if not isinstance(live, dict):
            return live is None and not wanted
        return all(covers(value, live.get(name)) for name, value in wanted.items())
    if isinstance(wanted, list):
        if not isinstance(live, list):
            return live is None and not wanted
        return all(covers(item, other) for item, other in _pairs(wanted, live)) and _complete(wanted, live)
    if live is None:
        return wanted is None or wanted == "" or wanted is False
    return bool(wanted == live)


def projection(wanted: Any, live: Any) -> Any:
    """`live` cut to the fields of `wanted`."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        return {name: projection(value, live.get(name)) for name, value in wanted.items()}
    if isinstance(wanted, list) and isinstance(live, list):
        return [projection(item, other) for item, other in _pairs(wanted, live)]
    return live


def _complete(wanted: list[Any], live: list[Any]) -> bool:
    """Lists of maps with a key may have grown items of others (a sidecar); other lists are ours as a
    whole."""
    return len(wanted) == len(live) or (
        bool(wanted) and _key(wanted[0]) is not None and len(live) > len(wanted)
    )


def _pairs(wanted: list[Any], live: list[Any]) -> list[tuple[Any, Any]]:
    key = _key(wanted[0]) if wanted else None
    if key is None:
        padded = [*live, *[None] * (len(wanted) - len(live))]
        return list(zip(wanted, padded, strict=False))
    by_key = {item.get(key): item for item in live if isinstance(item, dict)}
    return [(item, by_key.get(item.get(key))) for item in wanted]


def _key(item: Any) -> str | None:
    return next((key for key in _KEYS if key in item), None) if isinstance(item, dict) else None
