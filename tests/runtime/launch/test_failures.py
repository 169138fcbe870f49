"""What is said of a lost stage."""

from __future__ import annotations

import pytest

from llmpq.child import CallFailed
from llmpq.runtime.launch.failures import lost_stage

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "failure",
    [
        CallFailed("its process died (killed by SIGABRT): what(): Too many open files"),
        CallFailed("gone", RuntimeError("gloo: rv != -1. -1 vs -1. Too many open files")),
    ],
)
def test_files_that_ran_out_are_the_cause(demo_model, make_plan, failure):
    said = str(lost_stage(failure, make_plan(demo_model, (3,)), 0, phase="connecting", pid=7))
    assert "Too many open files" in said and said.endswith("allow more: ulimit -n 1024")
