"""Responses in Redis, for `previous_response_id`, references to items and `GET /v1/responses/ID`.

    leadline:{responses/TENANT}:r:ID      a response, and the input items that it answers
    leadline:{responses/TENANT}:i:ITEM    the id of the response that has an output item
    leadline:{responses/TENANT}:ids       ids by the time at which they were stored

TENANT is a digest. A response is found under its own tenant only. All keys expire. Of a tenant's responses
the newest are kept.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
from redis.exceptions import RedisError, ResponseError

from leadline.gateway.config.settings import ResponsesConfig
from leadline.gateway.errors import GatewayRefusal
from leadline.gateway.redis_client import connect
from leadline.protocol.http.exchange import too_large

__all__ = ["ResponseStore", "Stored", "UnknownResponse", "input_items", "listed"]

log = logging.getLogger("leadline.gateway")

_TIMEOUT = 2.0
"""Seconds for one answer of Redis."""
_PAUSE = 10.0
"""Seconds without a try after Redis has not answered: one that hangs must not delay every answer. A Redis
that refuses a command, as it does writes when its memory is full, answers the next one."""
_LONGEST_ID = 128
_POINTERS = (b'"previous_response_id"', b'"id"')
_encode = msgspec.json.Encoder().encode


class Stored(msgspec.Struct, array_like=True):
    """One response."""

    response: dict[str, Any]
    """As the client got it."""
    input: list[Any]
    """Items that it answers, those of earlier responses included."""


class _Asked(msgspec.Struct):
    input: Any = None
    store: Any = None


class _AnswerItem(msgspec.Struct):
    id: str | None = None


class _Answer(msgspec.Struct):
    id: str
    output: list[_AnswerItem]


_asked = msgspec.json.Decoder(_Asked)
_answers = msgspec.json.Decoder(_Answer)
_stored = msgspec.json.Decoder(Stored)


class UnknownResponse(GatewayRefusal):
    """No response or item with this id is stored for the caller."""

    status = 404
    type = "not_found_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param=param, code="response_not_found")


class StoreDown(GatewayRefusal):
    """Redis does not answer."""

    status = 503
    type = "server_error"

    def __init__(self) -> None:
        super().__init__("stored responses cannot be read at present", code="store_down", retry_after=1)


class ResponseStore:
    """Responses of all tenants. Raises ValueError for a URL that cannot be read."""

    def __init__(
        self, url: str, config: ResponsesConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._down_until = 0.0
        """No try before."""
        self.enabled = bool(url) and config.store_seconds > 0
        self._config = config
        self._redis = connect(url, _TIMEOUT) if self.enabled else None

    async def close(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    async def get(self, tenant: str, response_id: str, param: str | None = None) -> Stored:
        """Return a response of this tenant. Raises UnknownResponse, StoreDown."""
        data = await self._read(_key(tenant, "r", response_id))
        if data is None:
            raise UnknownResponse(f"no response {response_id[:_LONGEST_ID]!r} is stored", param)
        return _stored.decode(data)

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete a response of this tenant. Raises UnknownResponse, StoreDown."""
        found = await self.get(tenant, response_id)
        assert self._redis is not None
        keys = [_key(tenant, "r", response_id)]
        keys += [_key(tenant, "i", str(item.get("id"))) for item in found.response.get("output", ())]
        try:
            await self._redis.delete(*keys)
            await self._redis.zrem(_index(tenant), response_id)
        except (RedisError, OSError):
            raise StoreDown from None

    async def resolve(self, body: bytes, tenant: str, max_bytes: int) -> dict[str, object]:
        """Return the fields that a body needs in place of its references to what is stored: none where it has
        no such references. Raises UnknownResponse, StoreDown, and BodyTooLarge where the items that are
        referred to have more than `max_bytes` together."""
        if not self.enabled or not any(name in body for name in _POINTERS):
            return {}
        try:
            plain = msgspec.json.decode(body)
        except (msgspec.DecodeError, RecursionError):  # refused where the body is read
            return {}
        if not isinstance(plain, dict):
            return {}
        previous, given = plain.get("previous_response_id"), plain.get("input")
        items = input_items(given)
        if items is None:
            return {}
        fields: dict[str, object] = {}
        before: list[Any] = []
        if isinstance(previous, str):
            found = await self.get(tenant, previous, "previous_response_id")
            before = [*found.input, *found.response["output"]]
            fields = {"previous_response_id": None, "resolved_response_id": previous}
        references = {number: str(item["id"]) for number, item in enumerate(items) if _is_reference(item)}
        if references:
            items = await self._with_items(tenant, items, references, max_bytes)
        return {**fields, "input": [*before, *items]} if before or references else fields

    def keeper(self, body: bytes, tenant: str) -> Callable[[bytes], Awaitable[None]] | None:
        """Return what stores the answer to a body; None where it is not to be stored."""
        if not self.enabled:
            return None
        try:
            asked = _asked.decode(body)
        except (msgspec.DecodeError, RecursionError):
            return None
        items = input_items(asked.input)
        if items is None or asked.store is False:
            return None
        return partial(self.keep, tenant, items)

    async def keep(self, tenant: str, items: list[Any], answer: bytes) -> None:
        """Store an answer (JSON of a response) to `items`. One that is too large is not stored, and neither
        is any while Redis is down, refuses, or has just not answered."""
        assert self._redis is not None
        if self._clock() < self._down_until:
            return
        config = self._config
        try:
            made = _answers.decode(answer)
            data = _encode((msgspec.Raw(answer), items))
        except (msgspec.DecodeError, RecursionError):
            return
        if len(data) > config.max_bytes:
            log.info("a response of %d bytes is too large to be stored", len(data))
            return
        index, now, seconds = _index(tenant), time.time(), max(1, round(config.store_seconds))
        try:
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.set(_key(tenant, "r", made.id), data, ex=seconds)
                for item in made.output:
                    if item.id is not None:
                        pipe.set(_key(tenant, "i", item.id), made.id, ex=seconds)
                pipe.zadd(index, {made.id: now})
                pipe.zremrangebyscore(index, 0, now - seconds)
                pipe.expire(index, seconds)
                pipe.zrange(index, 0, -config.max_per_tenant - 1)
                oldest = (await pipe.execute())[-1]
            if oldest:
                names = [name.decode() for name in oldest]
                await self._redis.delete(*[_key(tenant, "r", name) for name in names])
                await self._redis.zrem(index, *names)
        except ResponseError as error:
            log.warning("a response could not be stored: %s", error)
        except (RedisError, OSError) as error:
            self._down_until = self._clock() + _PAUSE
            log.warning("a response could not be stored, and none will be for %g s: %s", _PAUSE, error)

    async def _with_items(
        self, tenant: str, items: list[Any], references: dict[int, str], max_bytes: int
    ) -> list[Any]:
        """Return `items` with output items in place of references (place in `items` → id)."""
        wanted, whole, size = set(references.values()), list(items), 0
        found: dict[str, tuple[Any, int]] = {}
        """Items that were read, with their length as JSON."""
        for number, name in references.items():
            if name not in found:
                output = await self._output_with(tenant, name, f"input[{number}]")
                found.update(
                    (key, (item, len(_encode(item)))) for key, item in output.items() if key in wanted
                )
            whole[number], length = found[name]
            size += length
            if size > max_bytes:
                raise too_large(max_bytes)
        return whole

    async def _output_with(self, tenant: str, name: str, param: str) -> dict[str, Any]:
        """Return the output items, by id, of the response that has the item `name`."""
        owner = await self._read(_key(tenant, "i", name))
        if owner is not None:
            found = await self.get(tenant, owner.decode(), param)
            output = {str(item.get("id")): item for item in found.response["output"]}
            if name in output:
                return output
        raise UnknownResponse(f"no item {name[:_LONGEST_ID]!r} is stored", param)

    async def _read(self, key: str) -> bytes | None:
        assert self._redis is not None
        if self._clock() < self._down_until:
            raise StoreDown
        try:
            data: bytes | None = await self._redis.get(key)
        except ResponseError:
            raise StoreDown from None
        except (RedisError, OSError):
            self._down_until = self._clock() + _PAUSE
            raise StoreDown from None
        return data


def input_items(given: Any) -> list[Any] | None:
    """`input` of a request as a list of items; None where it is neither a text nor a list."""
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    return given if isinstance(given, list) else None


def listed(response_id: str, items: list[Any]) -> dict[str, Any]:
    """Return the list object of a response's input items, in their order. Items without an id get one."""
    data = []
    for number, item in enumerate(items):
        shown = {"type": "message", "id": f"in_{response_id}_{number}", "status": "completed"} | item
        if isinstance(shown.get("content"), str):
            kind = "output_text" if shown.get("role") == "assistant" else "input_text"
            more: dict[str, Any] = {"annotations": [], "logprobs": []} if kind == "output_text" else {}
            shown["content"] = [{"type": kind, "text": shown["content"], **more}]
        data.append(shown)
    ids = [str(item["id"]) for item in data] or [""]
    return {"object": "list", "data": data, "first_id": ids[0], "last_id": ids[-1], "has_more": False}


def _is_reference(item: Any) -> bool:
    """Return whether an item is a reference with an id; the type may be missing, as `InputItem.kind` says."""
    if not isinstance(item, dict) or item.get("id") is None:
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.get("role") is None)


def _prefix(tenant: str) -> str:
    digest = hashlib.sha256(tenant.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"leadline:{{responses/{digest}}}"


def _index(tenant: str) -> str:
    return f"{_prefix(tenant)}:ids"


def _key(tenant: str, kind: str, name: str) -> str:
    # A digest of longer names: no client makes keys of any length.
    if len(name) > _LONGEST_ID:
        name = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{_prefix(tenant)}:{kind}:{name}"
