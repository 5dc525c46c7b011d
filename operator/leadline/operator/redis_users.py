"""Gives each service a user of its own in Redis or Valkey, which may touch the keys of that service only.

The operator holds an administrator's URL (`redis_admin_url`). A service's password is derived from the
administrator's password and the service's uid, so nothing is stored or read back: after a restart of the
operator the same users come out. Every `LOOK_SECONDS` the users in Redis are compared with the services: the
missing ones are set, those of deleted services deleted. So a Redis that has lost its users (Valkey keeps
them in memory) gets them again.

When the administrator's password changes, users get the new password beside the old one, which goes after
`GRACE_SECONDS`: by then the kubelet has updated the Secret that engines read at each connection. No engine
restarts. docs/decisions/026 has the reasons.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit, urlunsplit

from leadline.operator.kube.store import Key, Store
from leadline.operator.settings import OperatorSettings
from leadline.protocol.keys import ServiceKeys

__all__ = ["RedisUsers", "login_of", "place_of", "rules_of", "user_name"]

log = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
GRACE_SECONDS = 600.0
_TIMEOUT = 5.0
_LONGEST_PAUSE = 30.0
_COMMANDS = (
    "ping",
    "select",
    "client|setname",
    "client|setinfo",
    "xadd",
    "xrevrange",
    "set",
    "pexpire",
    "del",
    "hset",
    "hget",
    "hdel",
)
"""What an engine's publisher sends."""


def place_of(settings: OperatorSettings) -> str:
    """URL of the Redis that engines publish to, without user and password; empty: none."""
    parts = urlsplit(settings.redis_url or settings.redis_admin_url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def login_of(settings: OperatorSettings, key: Key, uid: str) -> tuple[str, str] | None:
    """User and password of a service's engines; None: Redis wants none."""
    if settings.redis_admin_url:
        secret = unquote(urlsplit(settings.redis_admin_url).password or "")
        mac = hmac.digest(secret.encode(), f"leadline engine {uid}".encode(), hashlib.sha256)
        return user_name(settings, key), base64.urlsafe_b64encode(mac).decode().rstrip("=")
    parts = urlsplit(settings.redis_url)
    if parts.password is None and parts.username is None:
        return None
    return unquote(parts.username or ""), unquote(parts.password or "")


def user_name(settings: OperatorSettings, key: Key) -> str:
    """With the operator's own name, since several may share one Redis."""
    return f"{_owner(settings)}{key[0]}/{key[1]}"


def rules_of(key: Key, password: str) -> list[str]:
    """Arguments of ACL SETUSER; passwords that the user has beside this one stay."""
    prefix = ServiceKeys(*key).prefix
    return [
        "on",
        f"#{_hash(password)}",
        "resetkeys",
        f"~{prefix}:*",
        "resetchannels",
        "-@all",
        *(f"+{command}" for command in _COMMANDS),
    ]


class RedisUsers:
    """`run` it as a task while this replica acts."""

    def __init__(
        self,
        store: Store,
        settings: OperatorSettings,
        connected: Callable[[bool], None] = lambda up: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`connected(up)` is called when the users can, or can no longer, be maintained."""
        self._store, self._settings, self._connected, self._clock = store, settings, connected, clock
        self._made: dict[str, str] = {}
        """User → password, of those set over this connection."""
        self._outdated: dict[tuple[str, str], float] = {}
        """(user, hash of a password that is not its own) → when it was first seen."""
        self._complained: str | None = None

    async def run(self) -> None:
        """Without end. Returns at once if there is no administrator's URL."""
        pause = 0.5
        while self._settings.redis_admin_url:
            try:
                connection = await _Connection.open(self._settings.redis_admin_url)
                try:
                    self._made.clear()
                    while True:
                        await self.look(connection)
                        self._report("")
                        pause = 0.5
                        await asyncio.sleep(LOOK_SECONDS)
                finally:
                    connection.close()
            except (OSError, EOFError, ValueError, TimeoutError, _Error) as error:
                self._report(str(error) or type(error).__name__)
            except Exception as error:
                log.exception("users in Redis: a fault of the operator")
                self._report(f"{type(error).__name__}: {error}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)

    async def look(self, connection: _Connection) -> None:
        """Compare the users with the services once, and put them right."""
        wanted = self._wanted()
        there = {name.decode("utf-8", "replace") for name in await connection.ask("ACL", "USERS")}
        commands = [
            ("ACL", "SETUSER", name, *rules_of(key, password))
            for name, (key, password) in wanted.items()
            if name not in there or self._made.get(name) != password
        ]
        gone = [name for name in there if name.startswith(_owner(self._settings)) and name not in wanted]
        commands += [("ACL", "DELUSER", name) for name in gone]
        if commands:
            await connection.ask_all(commands)
            log.info("Redis users: %d set, %d deleted", len(commands) - len(gone), len(gone))
            changed = [command[2] for command in commands if command[1] == "SETUSER"]
            for name, user in zip(
                changed, await connection.ask_all([("ACL", "GETUSER", name) for name in changed]), strict=True
            ):
                self._note_outdated(name, _hash(wanted[name][1]), user)
            self._made = {name: password for name, (_, password) in wanted.items()}
        due = [pair for pair, since in self._outdated.items() if self._clock() - since >= GRACE_SECONDS]
        for name, old in due:
            del self._outdated[name, old]
            if name in wanted and old != _hash(wanted[name][1]):
                await connection.ask("ACL", "SETUSER", name, f"!{old}")

    # -- inside ----------------------------------------------------------------------------------------------

    def _wanted(self) -> dict[str, tuple[Key, str]]:
        found = {}
        for key in self._store.services():
            service = self._store.service(key)
            if service is None or not self._settings.selects(service):
                continue
            login = login_of(self._settings, key, str(service["metadata"]["uid"]))
            assert login is not None
            found[login[0]] = key, login[1]
        return found

    def _note_outdated(self, name: str, own: str, user: Any) -> None:
        fields = dict(zip(user[::2], user[1::2], strict=False)) if isinstance(user, list) else {}
        for one in fields.get(b"passwords") or []:
            if (old := one.decode()) != own:
                self._outdated.setdefault((name, old), self._clock())

    def _report(self, problem: str) -> None:
        if problem == self._complained:
            return
        self._complained = problem
        self._connected(not problem)
        if problem:
            log.warning(
                "Redis users at %s cannot be maintained; new services are routed by load alone: %s",
                urlsplit(place_of(self._settings)).netloc,
                problem,
            )


class _Error(Exception):
    """An error reply of Redis."""


class _Connection:
    """The few commands that users need, over RESP2. There is no Redis client in the operator's image."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, url: str) -> _Connection:
        """Raises OSError, TimeoutError, _Error (the password is refused), or ValueError for another URL than
        redis:// or rediss://."""
        parts = urlsplit(url)
        if parts.scheme not in ("redis", "rediss") or not parts.hostname:
            raise ValueError("the administrator's URL must begin with redis:// or rediss:// and name a host")
        tls = None
        if parts.scheme == "rediss":
            tls = ssl.create_default_context(
                cafile=next(iter(parse_qs(parts.query).get("ssl_ca_certs", ())), None)
            )
        async with asyncio.timeout(_TIMEOUT):
            made = cls(*await asyncio.open_connection(parts.hostname, parts.port or 6379, ssl=tls))
            if parts.password is not None:
                user = unquote(parts.username or "") or "default"
                await made.ask("AUTH", user, unquote(parts.password))
        return made

    def close(self) -> None:
        self._writer.close()

    async def ask(self, *words: str) -> Any:
        """One command. Raises _Error for an error reply."""
        return (await self.ask_all([words]))[0]

    async def ask_all(self, commands: list[tuple[str, ...]]) -> list[Any]:
        for words in commands:
            encoded = [word.encode() for word in words]
            self._writer.write(b"*%d\r\n" % len(encoded))
            self._writer.writelines(b"$%d\r\n%b\r\n" % (len(word), word) for word in encoded)
        async with asyncio.timeout(_TIMEOUT):
            await self._writer.drain()
            replies = [await self._reply() for _ in commands]
        for reply in replies:
            if isinstance(reply, _Error):
                raise reply
        return replies

    async def _reply(self) -> Any:
        line = await self._reader.readuntil(b"\r\n")
        kind, text = line[:1], line[1:-2]
        if kind == b"-":
            return _Error(text.decode("utf-8", "replace"))
        if kind == b"+":
            return text
        if kind == b":":
            return int(text)
        if kind == b"$":
            return None if text == b"-1" else (await self._reader.readexactly(int(text) + 2))[:-2]
        if kind == b"*":
            return [await self._reply() for _ in range(int(text))]
        raise ValueError("what answers is not Redis")


def _owner(settings: OperatorSettings) -> str:
    return f"{settings.own_namespace}/{settings.lease_name}:"


def _hash(password: str) -> str:
    return hashlib.sha256(password.encode()).hexdigest()
