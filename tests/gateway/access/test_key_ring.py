"""Keys: hashed at rest, compared safely, reloaded on change, never shown."""

import asyncio
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.gateway.access.keys import ANONYMOUS, KeyRing, Principal, hash_key, key_entry, new_key
from leadline.gateway.errors import ConfigError, InvalidKey, ModelForbidden


def ring_file(path: Path, *entries: str) -> Path:
    path.write_text("keys:\n" + "".join(entries))
    return path


@pytest.fixture
def keys(tmp_path: Path) -> tuple[KeyRing, str, Path]:
    key, entry = key_entry(
        "alice",
        tenant="team-a",
        models=["Qwen/Qwen3-8B", "small-*"],
        requests_per_minute=60,
        tokens_per_minute=1_000,
        **{"class": "batch"},
    )
    path = ring_file(tmp_path / "keys.yaml", entry)
    return KeyRing(path), key, path


def test_without_a_file_everybody_is_anonymous() -> None:
    ring = KeyRing()
    assert ring.authenticate(None) is ANONYMOUS
    assert ring.authenticate("Bearer anything") is ANONYMOUS


def test_a_key_is_known_by_its_hash_and_says_who_asks(keys: tuple[KeyRing, str, Path]) -> None:
    ring, key, path = keys
    assert key not in path.read_text()
    assert ring.authenticate(f"Bearer {key}") == Principal(
        "team-a", "alice", frozenset({"Qwen/Qwen3-8B", "small-*"}), "batch", 60, 1_000
    )
    assert ring.authenticate(f"bearer  {key} ").name == "alice"


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Basic abc", "Bearer wrong", "Bearer " + "x" * 100_000, "Bearer \ud800é"],
)
def test_anything_else_is_a_401(keys: tuple[KeyRing, str, Path], header: str | None) -> None:
    with pytest.raises(InvalidKey) as refused:
        keys[0].authenticate(header)
    error = refused.value
    assert (error.status, error.code, error.type) == (401, "invalid_api_key", "authentication_error")
    assert error.headers["WWW-Authenticate"] == "Bearer"
    assert "wrong" not in error.message


@given(st.text(max_size=50))
def test_no_guess_is_a_key(guess: str) -> None:
    ring = KeyRing.__new__(KeyRing)
    KeyRing.__init__(ring)
    ring._path = Path("x")
    with pytest.raises(InvalidKey):
        ring.authenticate("Bearer " + guess)


def test_models_are_allowed_by_name_or_by_beginning(keys: tuple[KeyRing, str, Path]) -> None:
    ring, key, _ = keys
    who = ring.authenticate(f"Bearer {key}")
    assert who.allows("Qwen/Qwen3-8B")
    assert who.allows("small-7b")
    assert not who.allows("Qwen/Qwen3-80B")
    with pytest.raises(ModelForbidden) as refused:
        who.require("other")
    assert (refused.value.status, refused.value.param) == (403, "model")
    assert ANONYMOUS.allows("anything")


def test_an_expired_key_is_refused(tmp_path: Path) -> None:
    key, _ = key_entry("old")
    text = f"  - {{name: old, hash: '{hash_key(key)}', expires: 2020-01-01T00:00:00Z}}\n"
    ring = KeyRing(ring_file(tmp_path / "keys.yaml", text))
    with pytest.raises(InvalidKey, match="expired"):
        ring.authenticate(f"Bearer {key}")


def test_a_changed_file_is_taken_over(keys: tuple[KeyRing, str, Path]) -> None:
    ring, key, path = keys
    assert not ring.poll()
    new, entry = key_entry("bob")
    ring_file(path, entry)
    assert ring.poll()
    assert ring.authenticate(f"Bearer {new}").name == "bob"
    with pytest.raises(InvalidKey):
        ring.authenticate(f"Bearer {key}")


def test_the_symlink_swap_of_a_mounted_secret_is_noticed(tmp_path: Path) -> None:
    """Kubernetes: keys.yaml -> ..data/keys.yaml, ..data -> ..2026_1, and `..data` is renamed over."""
    (key_one, entry_one), (key_two, entry_two) = key_entry("one"), key_entry("two")
    for folder, entry in (("..2026_1", entry_one), ("..2026_2", entry_two)):
        (tmp_path / folder).mkdir()
        ring_file(tmp_path / folder / "keys.yaml", entry)
    stamp = (tmp_path / "..2026_1" / "keys.yaml").stat()
    os.utime(tmp_path / "..2026_2" / "keys.yaml", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    (tmp_path / "..data").symlink_to("..2026_1")
    (tmp_path / "keys.yaml").symlink_to("..data/keys.yaml")
    ring = KeyRing(tmp_path / "keys.yaml")
    assert ring.authenticate(f"Bearer {key_one}").name == "one"
    (tmp_path / "..data_tmp").symlink_to("..2026_2")
    (tmp_path / "..data_tmp").rename(tmp_path / "..data")
    assert ring.poll()
    assert ring.authenticate(f"Bearer {key_two}").name == "two"


@pytest.mark.parametrize("broken", ["keys: [", "keys: 5", "[]", "keys:\n- {name: x, hash: plain}", "\0"])
def test_a_broken_file_keeps_the_old_keys_and_is_logged_once(
    keys: tuple[KeyRing, str, Path], broken: str, caplog: pytest.LogCaptureFixture
) -> None:
    ring, key, path = keys
    path.write_text(broken)
    with caplog.at_level(logging.INFO):
        assert not ring.poll()
        assert not ring.poll()
    assert ring.authenticate(f"Bearer {key}").name == "alice"
    assert len(caplog.records) == ring.failed_reloads == 1
    path.unlink()
    assert not ring.poll()
    assert ring.authenticate(f"Bearer {key}").name == "alice"


def test_a_file_that_is_broken_at_the_start_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"keys\[0\]\.hash"):
        KeyRing(ring_file(tmp_path / "k", "- {name: x, hash: my-plain-key}"))
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyRing(tmp_path / "none")


def test_names_and_keys_are_in_the_file_once(tmp_path: Path) -> None:
    key, entry = key_entry("x")
    with pytest.raises(ConfigError, match="twice"):
        KeyRing(ring_file(tmp_path / "k", entry, key_entry("x")[1]))
    with pytest.raises(ConfigError, match="already"):
        KeyRing(ring_file(tmp_path / "k", entry, key_entry("y", key)[1]))


def test_no_message_holds_a_key_or_a_hash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = new_key()
    hashed = hash_key(key)
    path = ring_file(tmp_path / "k", f"- {{name: x, hash: '{hashed}'}}")
    with caplog.at_level(logging.DEBUG):
        ring = KeyRing(path)
        messages = [repr(ring), repr(ring.authenticate(f"Bearer {key}"))]
        with pytest.raises(InvalidKey) as refused:
            ring.authenticate(f"Bearer {key}x")
        messages.append(refused.value.message)
        for text in (
            f"- {{name: x, hash: '{hashed}0'}}",
            f"- {{name: {key}, hush: '{hashed}'}}",
            f"- ['{key}'",
        ):
            ring_file(path, text)
            ring.poll()
    messages += caplog.messages
    assert len(caplog.messages) == 3
    assert not [message for message in messages if key in message or hashed in message]


async def test_watching_takes_changes_over_by_itself(keys: tuple[KeyRing, str, Path]) -> None:
    ring, _, path = keys
    changed = asyncio.Event()
    task = asyncio.create_task(ring.watch(0.01, changed.set))
    new, entry = key_entry("bob")
    ring_file(path, entry)
    await asyncio.wait_for(changed.wait(), 10)
    assert ring.authenticate(f"Bearer {new}").name == "bob"
    task.cancel()


@pytest.mark.parametrize("key", ["", " x", "a b", "schlüssel", "x\n"])
def test_keys_that_no_client_could_send_are_refused(key: str) -> None:
    with pytest.raises(ConfigError):
        hash_key(key)


def test_made_keys_differ_and_entries_are_yaml() -> None:
    assert new_key() != new_key()
    with pytest.raises(ConfigError, match="requests_per_minute"):
        key_entry("x", requests_per_minute=-1)
