"""A local copy of the API server's objects of one kind, by list and watch of `kubernetes.aio`.

The library's asyncio part has no informer. This one decides what to do when a watch ends or fails:

    the server ends it (always, after a time)    watch again from the last resourceVersion, bookmarks included
    410 Gone, as status or as event              list again: the versions in between are lost
    the connection breaks                        watch again from the last resourceVersion
    the connection is silent                     no byte for longer than the server's timeout: list again
    429 or 5xx in answer to a watch              watch again from the last resourceVersion, after a pause
    the server refuses otherwise                 list again
    the API server is away                       keep the copy, try again with growing pauses
    an event was lost                            list again every `resync` seconds

A list replaces the copy only when all its pages have come, so a failure never empties a service.
Source: https://kubernetes.io/docs/reference/using-api/api-concepts/ (efficient detection of changes).
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.dynamic import DynamicClient, Resource
from kubernetes.aio.watch import Watch

from leadline.gateway.discovery.slices import Metadata

__all__ = ["Reflector", "Timing"]


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    resync: float = 300.0
    """Between complete lists."""
    watch: float = 60.0
    """The server is asked to end a watch after so long."""
    slack: float = 15.0
    """A watch that is silent for `watch` and this long is dead."""
    request: float = 20.0
    """A list may take so long between two bytes."""
    first_pause: float = 0.2
    longest_pause: float = 30.0


log = logging.getLogger(__name__)

_PAGE = 500
_STOOD = 10
"""A watch that has lasted so many times the pause that is due stood for long."""


class Item(Protocol):
    """An object of the API server."""

    @property
    def metadata(self) -> Metadata: ...

    @property
    def key(self) -> str: ...


ItemT = TypeVar("ItemT", bound=Item)


class Reflector(Generic[ItemT]):
    """Objects of one kind and one namespace (empty: all) with one label selector."""

    def __init__(
        self,
        client: ApiClient,
        kind: type[ItemT],
        resource: tuple[str, str, str],
        namespace: str,
        selector: str,
        changed: Callable[[Iterable[ItemT], Iterable[ItemT]], None],
        timing: Timing | None = None,
    ) -> None:
        """`resource`: API group, version and plural of the kind. `changed(gone, come)`: objects as they were,
        and as they are; a changed object is in both."""
        group, version, self.plural = resource
        self._kind = kind
        self._dynamic = DynamicClient(client)
        # Described here, so that neither the library's discovery requests nor rights for them are needed.
        self._resource = Resource(
            prefix="apis",
            group=group,
            api_version=version,
            kind=kind.__name__,
            name=self.plural,
            namespaced=True,
        )
        self._scope = {"namespace": namespace or None, "label_selector": selector or None}
        self._watcher = Watch()
        self._changed = changed
        self._timing = timing or Timing()
        self._held: dict[str, ItemT] = {}
        self._version = ""
        self._listed_at = float("-inf")
        self.synced = asyncio.Event()
        """Set once the first list is in."""
        self.lists = self.watches = self.failures = 0

    async def run(self) -> None:
        """List and watch until cancelled."""
        pause = self._timing.first_pause
        reported = ""
        while True:
            watching_since = float("inf")
            try:
                if time.monotonic() - self._listed_at >= self._timing.resync:
                    await self._list()
                watching_since = time.monotonic()
                await self._watch()
                pause, reported = self._timing.first_pause, ""
                continue
            except ApiException as error:
                if not _is_busy(error.status):
                    self._listed_at = float("-inf")
                if error.status == 410 and pause == self._timing.first_pause:
                    pause *= 2  # the usual case needs no pause, a repeated one does
                    continue
                if error.status == 404:
                    self.synced.set()  # there are no objects of a kind that the server does not know
                problem = self._describe(error)
            except (aiohttp.ClientError, OSError) as error:
                if isinstance(error, TimeoutError):
                    self._listed_at = float("-inf")
                problem = str(error) or type(error).__name__
            except Exception as error:  # the library raises plain Exception for an event that it cannot read
                self._listed_at = float("-inf")
                problem = f"{type(error).__name__}: {error}"
            self.failures += 1
            if time.monotonic() - watching_since >= _STOOD * pause:
                # A proxy may end every watch before its time: each one that stood for long is a success.
                pause = self._timing.first_pause
            if problem != reported:
                reported = problem
                log.warning("discovery: keeping %d %s as they are: %s", len(self._held), self.plural, problem)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, self._timing.longest_pause)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Read everything and replace the copy. The server answers with its latest (no resourceVersion)."""
        self.lists += 1
        items: dict[str, ItemT] = {}
        following = None
        while True:
            page = await self._dynamic.get(
                self._resource,
                **self._scope,
                limit=_PAGE,
                _continue=following,
                serializer=_plain,
                _request_timeout=_timeout(self._timing.request),
            )
            for found in page.get("items") or ():
                item = msgspec.convert(found, self._kind)
                items[item.key] = item
            following = page["metadata"].get("continue")
            if not following:
                break
        old, self._held = self._held, items
        self._version = page["metadata"].get("resourceVersion", "")
        self._listed_at = time.monotonic()
        self._changed(
            [item for key, item in old.items() if not _same(item, items.get(key))],
            [item for key, item in items.items() if not _same(item, old.get(key))],
        )
        self.synced.set()

    async def _watch(self) -> None:
        """Follow changes until the server ends the watch or a list is due."""
        self.watches += 1
        due = self._listed_at + self._timing.resync - time.monotonic()
        seconds = max(1, round(min(self._timing.watch, due) * random.uniform(0.9, 1.0)))
        started = time.monotonic()
        events = self._watcher.stream(
            self._dynamic.get,
            self._resource,
            **self._scope,
            resource_version=self._version,
            timeout_seconds=seconds,
            query_params=[("allowWatchBookmarks", "true")],
            serialize=False,
            _request_timeout=_timeout(seconds + self._timing.slack),
        )
        # Left when an event cannot be read, too: else the library's next watch goes on with this answer.
        async with self._watcher:
            async for event in events:
                self._take(event)
        if time.monotonic() - started < min(1.0, seconds / 2):
            # A server or proxy that ends every watch at once must not be asked in a tight loop.
            await asyncio.sleep(self._timing.first_pause)

    def _take(self, event: dict[str, Any]) -> None:
        """Apply one event. The library raises ApiException for one of type ERROR."""
        if event["type"] != "BOOKMARK":
            item = msgspec.convert(event["raw_object"], self._kind)
            old = self._held.pop(item.key, None)
            if event["type"] == "DELETED":
                self._changed([old] if old is not None else [], [])
            else:
                self._held[item.key] = item
                self._changed([old] if old is not None else [], [item])
        # Only now: an event that could not be read is asked for again.
        self._version = event["raw_object"]["metadata"].get("resourceVersion") or self._version

    def _describe(self, error: ApiException) -> str:
        if error.status == 404:
            return f"the API server does not know {self.plural}: is the CustomResourceDefinition installed?"
        hint = ""
        if error.status in (401, 403):
            hint = f" (the gateway's service account needs list and watch on {self.plural})"
        try:
            message = json.loads(error.body)["message"]
        except (KeyError, TypeError, ValueError):
            message = error.reason or "no message"
        return f"the API server answered {error.status}: {message}{hint}"


def _is_busy(status: int) -> bool:
    """Whether the server cannot answer now: what it answered before still holds, and a list would burden it
    more."""
    return status == 429 or status >= 500


def _plain(_: DynamicClient, answer: Any) -> Any:
    """The library's hook for turning an answer into an object: leave it as it is."""
    return answer


def _timeout(between_bytes: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=between_bytes)


def _same(one: Item, other: Item | None) -> bool:
    return other is not None and (one.metadata.uid, one.metadata.resource_version) == (
        other.metadata.uid,
        other.metadata.resource_version,
    )
