"""What a server says while a stage that was lost is recovered."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from llmpq.runtime.launch.recovery import Recovery
from llmpq.runtime.serve.errors import ApiError
from llmpq.runtime.serve.service import Service
from llmpq.runtime.serve.settings import ServeSettings


@pytest.mark.parametrize(
    ("predicted_s", "since_s", "retry_after"),
    [(119.5, 0.0, "120"), (120.0, 60.0, "60"), (2.0, 30.0, "1"), (None, 0.0, "1")],
)
def test_clients_come_again_when_it_is_predicted_to_be_over(predicted_s, since_s, retry_after):
    recovery = Recovery(
        reason="stage 1 was lost",
        phase="decode",
        predicted_s=predicted_s,
        clock_s=time.perf_counter() - since_s,
    )
    service = Service(ServeSettings(model_names=("m",)))
    with pytest.raises(ApiError, match=r"being recovered since .*: stage 1 was lost") as refused:
        service.check_stages(SimpleNamespace(recovering=recovery))
    assert refused.value.status == 503
    assert refused.value.response_headers == {"Retry-After": retry_after}
    service.check_stages(SimpleNamespace(recovering=None))
