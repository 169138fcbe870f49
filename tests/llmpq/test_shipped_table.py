"""The package's own tables read the same by the quick parser as by the plain one."""

from __future__ import annotations

from importlib import resources

import pytest
import yaml

from llmpq.shipped_table import shipped_table

pytestmark = pytest.mark.pure


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("llmpq.clusters", "gpus.yaml"),
        ("llmpq", "models.yaml"),
        ("llmpq", "model_ids.yaml"),
        ("llmpq.planner.export", "engine_flags.yaml"),
    ],
)
def test_a_table_is_what_the_plain_parser_reads(package: str, name: str) -> None:
    text = resources.files(package).joinpath(name).read_text(encoding="utf-8")
    assert shipped_table(package, name) == yaml.safe_load(text)
