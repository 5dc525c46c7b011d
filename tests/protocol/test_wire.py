"""Messages between our own processes: round trips, size caps, one typed error for anything else."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.protocol.events import (
    MAX_BATCH_BYTES,
    CacheSnapshot,
    EventBatch,
    decode_batch,
    decode_snapshot,
    encode_batch,
    encode_snapshot,
)
from leadline.protocol.keys import ServiceKeys
from leadline.protocol.load import LoadReport, decode_report, encode_report
from leadline.protocol.wire import WireError

hashes = st.lists(st.integers(0, 2**64 - 1), max_size=20)
epochs = st.text(min_size=1, max_size=20)
counts = st.integers(0, 2**40)
rates = st.floats(0, 1e9)


@given(st.builds(EventBatch, epoch=epochs, seq=counts, stored=hashes, removed=hashes, cleared=st.booleans()))
def test_event_batches_survive_the_wire(batch):
    assert decode_batch(encode_batch(batch)) == batch


@given(epochs, st.integers(-1, 2**40), hashes)
def test_snapshots_survive_the_wire_at_eight_bytes_a_block(epoch, seq, blocks):
    packed = CacheSnapshot.pack(blocks)
    snapshot = CacheSnapshot(epoch=epoch, seq=seq, stream_id="7-0", packed=packed)
    again = decode_snapshot(encode_snapshot(snapshot))
    assert again == snapshot
    assert again.hashes() == array("Q", blocks)
    assert len(packed) == 8 * len(blocks)


@given(
    st.builds(
        LoadReport,
        pod=st.text(),
        address=st.text(),
        epoch=epochs,
        time=rates,
        model=st.text(),
        served_names=st.lists(st.text(), max_size=3),
        block_size=st.sampled_from([16, 64, 256]),
        running=counts,
        waiting=counts,
        queued_prefill_tokens=counts,
        free_blocks=counts,
        total_blocks=counts,
        prefill_tokens_per_second=rates,
        decode_step_seconds=rates,
        draining=st.booleans(),
    )
)
def test_load_reports_survive_the_wire(report):
    assert decode_report(encode_report(report)) == report


@pytest.mark.parametrize("decode", [decode_batch, decode_snapshot, decode_report])
@given(garbage=st.binary(max_size=200))
def test_garbage_is_a_wire_error(decode, garbage):
    with pytest.raises(WireError):
        decode(garbage)


@given(st.data())
def test_a_truncated_or_lengthened_batch_is_a_wire_error(data):
    message = encode_batch(EventBatch(epoch="e", seq=1, stored=[1, 2**64 - 1], removed=[3]))
    cut = data.draw(st.integers(0, len(message) - 1))
    for broken in (message[:cut], message + b"\x00"):
        with pytest.raises(WireError):
            decode_batch(broken)


def test_deep_nesting_is_a_wire_error():
    deep = b"\x82\xa5epoch\xa1e\xa1x" + b"\x91" * 100_000
    with pytest.raises(WireError):
        decode_batch(deep)


def test_a_message_over_the_cap_is_refused_before_it_is_read():
    with pytest.raises(WireError, match="exceeds the limit"):
        decode_batch(b"\x00" * (MAX_BATCH_BYTES + 1))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"seq": -1}, r"\$\.seq"),
        ({"epoch": ""}, r"\$\.epoch"),
        ({"stored": ["x"]}, r"\$\.stored\[0\]"),
        ({"removed": [1, -1]}, r"\$\.removed\[1\]"),
    ],
)
def test_a_batch_with_a_wrong_field_is_an_error_that_names_it(change, path):
    fields = {"epoch": "e", "seq": 0, "stored": [], "removed": []} | change
    with pytest.raises(WireError, match=path):
        decode_batch(msgspec.msgpack.encode(fields))


def test_a_snapshot_of_half_a_hash_is_a_wire_error():
    broken = encode_snapshot(CacheSnapshot(epoch="e", seq=0, packed=b"12345678abc"))
    with pytest.raises(WireError, match="8 bytes a block"):
        decode_snapshot(broken)


def test_fields_of_a_newer_version_are_ignored():
    report = LoadReport(pod="p", address="a:1", epoch="e", time=1.0, model="m", block_size=64)
    newer = msgspec.msgpack.decode(encode_report(report)) | {"added_later": 1}
    assert decode_report(msgspec.msgpack.encode(newer)) == report


def test_the_keys_of_a_service_share_one_cluster_slot():
    keys = ServiceKeys("prod", "qwen")
    assert keys.events == "leadline:{prod/qwen}:events"
    assert keys.pods == "leadline:{prod/qwen}:pods"
    assert keys.snapshot("qwen-0") == "leadline:{prod/qwen}:snapshot:qwen-0"


@pytest.mark.parametrize("name", ["", "a/b", "a{b", "a}b", "a:b"])
def test_a_name_that_would_break_the_keys_is_an_error(name):
    with pytest.raises(ValueError, match="namespace"):
        ServiceKeys(name, "s")
    with pytest.raises(ValueError, match="service"):
        ServiceKeys("n", name)
