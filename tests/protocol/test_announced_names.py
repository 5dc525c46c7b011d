"""Names of models in labels of Kubernetes, which take neither every character nor every length."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leadline.protocol.announced import labels_of_names, names_in_labels

KEY = re.compile(r"serving\.leadline\.io/[a-z0-9-]{1,63}")
VALUE = re.compile(r"[a-z0-9]{1,63}")
NAMES = st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80), max_size=17)


@given(NAMES)
def test_any_names_come_back_out_of_labels_that_kubernetes_takes(names: list[str]) -> None:
    labels = labels_of_names(names)
    assert all(KEY.fullmatch(key) and VALUE.fullmatch(value) for key, value in labels.items())
    assert names_in_labels({**labels, "app.kubernetes.io/name": "leadline"}) == names


@pytest.mark.parametrize("value", ["", "x", "!", "mfrgg", "7777777777"])
def test_labels_that_cannot_be_read_name_nothing(value: str) -> None:
    assert names_in_labels({"serving.leadline.io/served-names-0": value}) == []
