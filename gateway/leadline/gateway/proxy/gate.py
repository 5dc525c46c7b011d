"""Keys and limits as the hot path asks them: who is it, may it use this model, has it room in its minute."""

from leadline.gateway.keys import KeyRing
from leadline.gateway.limits import RateLimits
from leadline.gateway.principal import Principal
from leadline.gateway.services import Service

__all__ = ["KeyGate"]


class KeyGate:
    """Puts `KeyRing` and `RateLimits` behind the four questions of handler.py."""

    __slots__ = ("_keys", "_limits")

    def __init__(self, keys: KeyRing | None = None, limits: RateLimits | None = None) -> None:
        self._keys = keys or KeyRing()
        self._limits = limits

    @property
    def checks_slowly(self) -> bool:
        """Some key can be checked in a thread only: use `authenticate_slow`."""
        return self._keys.has_slow_keys

    def authenticate(self, authorization: str | None) -> Principal:
        """Raises InvalidKey (401)."""
        return self._keys.authenticate(authorization)

    async def authenticate_slow(self, authorization: str | None) -> Principal:
        """Raises InvalidKey (401). Right whether or not `checks_slowly`."""
        return await self._keys.authenticate_slow(authorization)

    def check_model(self, principal: Principal, model: str | None, service: Service) -> None:
        """Raises ModelForbidden (403). A request that names no model means the only service there is: then
        the key must allow one of its names."""
        if principal.allowed_models is None:
            return
        if model is not None:
            principal.require(model)
            return
        names = [*service.served_names, *service.reported_names(), service.name]
        if not any(principal.allows(name) for name in names):
            principal.require(names[0])

    def limits(self, principal: Principal) -> bool:
        """Whether requests of this key are counted."""
        return self._limits is not None and self._limits.apply_to(principal)

    async def take(self, principal: Principal, tokens: int) -> dict[str, str]:
        """Count the request against its key's minute; X-RateLimit-* headers. Raises RateLimited (429)."""
        if self._limits is None:
            return {}
        return await self._limits.take(principal, tokens)

    def settle(self, principal: Principal, estimated: int, actual: int) -> None:
        """The answer took so many tokens, not the estimated number."""
        if self._limits is not None and actual != estimated:
            self._limits.settle(principal, actual - estimated)
