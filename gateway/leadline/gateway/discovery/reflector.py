"""A local copy of the API server's objects of one kind, kept by list and watch.

Room: gateway/discovery. What goes wrong with watches, and what is done about it:

    the server ends it (always, after a time)    watch again from the last resourceVersion, bookmarks included
    410 Gone, as status or as event              list again: the versions in between are lost
    the connection breaks                        watch again from the last resourceVersion
    the connection dies without a word           no byte for longer than the server's timeout: list again
    the server refuses                           list again
    the API server is away                       keep what is known, try again with growing pauses
    an event was missed for whatever reason      list again every `resync` seconds

A list replaces the copy only when all its pages have come: nothing that fails ever empties a service.
Source: https://kubernetes.io/docs/reference/using-api/api-concepts/ (efficient detection of changes).
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Generic, Protocol, TypeVar

import aiohttp
import msgspec

from leadline.gateway.discovery.kube_api import KubeAPI
from leadline.gateway.discovery.slices import Metadata

__all__ = ["Reflector", "Timing"]

log = logging.getLogger(__name__)

_PAGE = "500"
_MAX_EVENT = 16 << 20


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str | None = msgspec.field(name="continue", default=None)


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class _Bookmark(msgspec.Struct):
    metadata: Metadata


class _Status(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


_lists = msgspec.json.Decoder(_List)
_events = msgspec.json.Decoder(_Event)
_bookmarks = msgspec.json.Decoder(_Bookmark)
_statuses = msgspec.json.Decoder(_Status)


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds."""

    resync: float = 300.0
    watch: float = 60.0
    """The server is asked to end a watch after so long."""
    slack: float = 15.0
    """Longer silence than `watch` by this: the connection is dead."""
    request: float = 20.0
    """A list may take so long between two bytes."""
    first_pause: float = 0.2
    longest_pause: float = 30.0


class Item(Protocol):
    """An object of the API server."""

    @property
    def metadata(self) -> Metadata: ...

    @property
    def key(self) -> str: ...


ItemT = TypeVar("ItemT", bound=Item)


class _Gone(Exception):
    """The resourceVersion is too old."""


class _Refused(Exception):
    """Another answer than hoped for."""


class _UnknownKind(_Refused):
    """404: the API server does not have the kind."""


class Reflector(Generic[ItemT]):
    """Objects of one kind and one namespace (empty: all) with one label selector."""

    def __init__(
        self,
        api: KubeAPI,
        kind: type[ItemT],
        resource: tuple[str, str],
        namespace: str,
        selector: str,
        changed: Callable[[Iterable[ItemT], Iterable[ItemT]], None],
        timing: Timing | None = None,
    ) -> None:
        """`resource`: API path and plural of the kind. `changed(gone, come)`: objects as they were, and as
        they are; a changed one is in both."""
        self._api = api
        self._decoder = msgspec.json.Decoder(kind)
        scope = f"namespaces/{namespace}/" if namespace else ""
        group, self.plural = resource
        self._path = f"{group}/{scope}{self.plural}"
        self._params = {"labelSelector": selector} if selector else {}
        self._changed = changed
        self._timing = timing or Timing()
        self._held: dict[str, ItemT] = {}
        self._version = ""
        self._listed_at = float("-inf")
        self.synced = asyncio.Event()
        """Set once the first list is in."""
        self.lists = self.watches = self.failures = 0

    async def run(self) -> None:
        """For ever. Only ends when cancelled."""
        pause = self._timing.first_pause
        complained = ""
        while True:
            try:
                if time.monotonic() - self._listed_at >= self._timing.resync:
                    await self._list()
                await self._watch()
                pause, complained = self._timing.first_pause, ""
                continue
            except _Gone:
                self._listed_at = float("-inf")
                if pause == self._timing.first_pause:  # the usual case needs no pause, a repeated one does
                    pause *= 2
                    continue
                problem = "410 Gone again"
            except _UnknownKind as error:
                problem = str(error)
                self.synced.set()  # there are none
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.DecodeError, _Refused) as error:
                problem = str(error) or type(error).__name__
                if isinstance(error, (TimeoutError, msgspec.DecodeError, _Refused)):
                    # The server has no use for our version (restored from a backup, say), or is not heard.
                    self._listed_at = float("-inf")
            self.failures += 1
            if problem != complained:
                complained = problem
                log.warning("discovery: keeping %d %s as they are: %s", len(self._held), self.plural, problem)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, self._timing.longest_pause)

    # -- inside ----------------------------------------------------------------------------------------------

    async def _list(self) -> None:
        """Read everything and replace the copy. The server answers with its latest (no resourceVersion)."""
        self.lists += 1
        items: dict[str, ItemT] = {}
        params = {**self._params, "limit": _PAGE}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=self._timing.request)
        while True:
            async with self._api.get(self._path, params, timeout=timeout) as response:
                await self._check(response)
                page = _lists.decode(await response.read())
            items.update((item.key, item) for item in map(self._decoder.decode, page.items or ()))
            if not page.metadata.continue_:
                break
            params["continue"] = page.metadata.continue_
        old, self._held = self._held, items
        self._version, self._listed_at = page.metadata.resource_version, time.monotonic()
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
        params = {
            **self._params,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(seconds),
        }
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=seconds + self._timing.slack)
        started = time.monotonic()
        async with self._api.get(self._path, params, timeout=timeout) as response:
            await self._check(response)
            async for line in _lines(response.content):
                self._event(_events.decode(line))
        if time.monotonic() - started < min(1.0, seconds / 2):
            # A server or proxy that ends every watch at once must not be asked in a tight loop.
            await asyncio.sleep(self._timing.first_pause)

    def _event(self, event: _Event) -> None:
        if event.type == "BOOKMARK":
            self._version = _bookmarks.decode(event.object).metadata.resource_version or self._version
            return
        if event.type == "ERROR":
            status = _statuses.decode(event.object)
            if status.code == 410:
                raise _Gone
            raise _Refused(f"the watch ended with {status.code} {status.reason}: {status.message}")
        item = self._decoder.decode(event.object)
        old = self._held.get(item.key)
        if event.type == "DELETED":
            self._held.pop(item.key, None)
            self._changed([old] if old is not None else [], [])
        elif event.type in ("ADDED", "MODIFIED"):
            self._held[item.key] = item
            self._changed([old] if old is not None else [], [item])
        # Only now: an event that could not be read is asked for again.
        self._version = item.metadata.resource_version or self._version

    async def _check(self, response: Any) -> None:
        if response.status == 200:
            return
        body = await response.content.read(4096)
        if response.status == 410:
            raise _Gone
        try:
            message = _statuses.decode(body).message
        except msgspec.DecodeError:
            message = ""
        if response.status == 404:
            raise _UnknownKind(
                f"the API server does not know {self.plural}: is the CustomResourceDefinition installed?"
            )
        hint = ""
        if response.status in (401, 403):
            hint = f" (the gateway's service account needs list and watch on {self.plural})"
        raise _Refused(f"the API server answered {response.status}: {message or 'no message'}{hint}")


def _same(one: Item, other: Item | None) -> bool:
    return other is not None and (one.metadata.uid, one.metadata.resource_version) == (
        other.metadata.uid,
        other.metadata.resource_version,
    )


async def _lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Lines of any length up to 16 MiB (aiohttp's own iteration stops at 128 KiB, which a slice can pass)."""
    parts: list[bytes] = []
    size = 0
    async for chunk in content.iter_any():
        *complete, rest = chunk.split(b"\n")
        for piece in complete:
            line = b"".join([*parts, piece])
            parts, size = [], 0
            if line.strip():
                yield line
        parts.append(rest)
        size += len(rest)
        if size > _MAX_EVENT:
            raise _Refused("a watch event is larger than 16 MiB")
