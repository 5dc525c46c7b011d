"""Which resources a namespace gives to containers that do not ask for them: its LimitRanges' defaults.

They are listed, not watched: a change matters for pods that are made later. An answer is
kept for a minute.
"""

from __future__ import annotations

import logging
import time

from leadline.operator.kube.api import ApiError, KubeApi
from leadline.operator.kube.kinds import Kind

__all__ = ["LIMIT_RANGE", "LimitRanges"]

log = logging.getLogger(__name__)

LIMIT_RANGE = Kind("LimitRange", "v1", "limitranges")
_KEEP_SECONDS = 60.0


class LimitRanges:
    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self._known: dict[str, tuple[float, frozenset[str]]] = {}
        """Namespace → when it was asked, and what it gives."""
        self._refused = ""

    async def of(self, namespace: str) -> frozenset[str]:
        """Names of resources. The API server fills in the defaults of a LimitRange that has `max` or `min`
        alone. Raises what a failed request raises; where they may not be listed there are none."""
        asked, found = self._known.get(namespace, (0.0, frozenset[str]()))
        if asked and time.monotonic() - asked < _KEEP_SECONDS:
            return found
        try:
            items, _ = await self._api.list(LIMIT_RANGE, namespace)
        except ApiError as error:
            if not error.is_permanent:
                raise
            if str(error) != self._refused:
                self._refused = str(error)
                log.warning("the LimitRanges of namespaces are not heeded: %s", error)
            items = []
        limits = [one for item in items for one in item["spec"].get("limits") or []]
        given = [
            one.get(field) or {}
            for one in limits
            for field in ("default", "defaultRequest")
            if one.get("type") == "Container"
        ]
        found = frozenset(name for amounts in given for name in amounts)
        self._known[namespace] = time.monotonic(), found
        return found
