"""The search for the fastest products, and the table it leaves in the cache directory: no GPU."""

import datetime
import json
from dataclasses import replace

import pytest

from llmpq.kernels.gemm.ranking import learned
from llmpq.kernels.gemm.ranking.config import Config
from llmpq.kernels.gemm.ranking.learned import CardKey, entry_of, read, write
from llmpq.kernels.gemm.ranking.machine import REFERENCE
from llmpq.kernels.gemm.ranking.predict import Product, expected_us
from llmpq.kernels.gemm.ranking.tune import FEW, NEAR, ranked, search

pytestmark = pytest.mark.cpu

NOW = datetime.datetime(2026, 5, 4, 12, tzinfo=datetime.UTC)
HERE = CardKey("Some GPU sm_90 132", "580.1", "abc")
PRODUCTS = [Product(4, 28672, 4096, 32, "bf16"), Product(8, 4096, 14336, 96, "fp16 zeros")]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class FakeTimer:
    """Times from a table; a clock that every call moves on by a second."""

    def __init__(self, times, default=100.0):
        self.times, self.default, self.calls, self.clock = times, default, [], 0

    def __call__(self, product, config):
        self.clock += 1
        self.calls.append((product, config))
        found = self.times.get((product, config), self.default)
        if isinstance(found, list):
            found = found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


def endless():
    return 1.0


@pytest.mark.parametrize("product", PRODUCTS)
def test_few_are_tried_best_expected_first(product):
    every = ranked(product, REFERENCE)
    configs = [config for config in every if config.x_stages == 1]
    times = [expected_us(config, product, REFERENCE) for config in configs]
    assert 2 <= len(configs) <= FEW and times == sorted(times) and configs == every[: len(configs)]
    assert times[-1] <= NEAR * times[0] and len(set(every)) == len(every)
    rings = every[len(configs) :]
    assert all(replace(c, x_stages=1) in configs for c in rings) and len(rings) <= FEW // 2


def test_the_fastest_of_those_tried_is_kept_if_it_is_faster_twice():
    product = PRODUCTS[0]
    first, second, *_ = ranked(product, REFERENCE)
    (found,), rest = search(
        [product], REFERENCE, FakeTimer({(product, first): 97.0, (product, second): 95.0}), endless
    )
    assert (found.config, found.before_us, found.us, rest) == (second, 100.0, 95.0, [])
    lucky = FakeTimer({(product, second): [95.0, 101.0]})
    (found,), _ = search([product], REFERENCE, lucky, endless)
    assert found.config is None and found.us == found.before_us == 100.0
    lucky = FakeTimer({(product, None): [100.0, 94.0], (product, second): 95.0})
    (found,), _ = search([product], REFERENCE, lucky, endless)
    assert found.config is None, "the clock moved, the product is no faster"


def test_a_gain_within_the_noise_changes_nothing():
    product = PRODUCTS[0]
    first = ranked(product, REFERENCE)[0]
    (found,), _ = search([product], REFERENCE, FakeTimer({(product, first): 99.9}), endless)
    assert found.config is None


def test_what_fails_is_left_out_and_named(caplog):
    product = PRODUCTS[1]
    first, second, *_ = ranked(product, REFERENCE)
    timer = FakeTimer({(product, first): RuntimeError("out of registers"), (product, second): 90.0})
    (found,), _ = search([product], REFERENCE, timer, endless)
    assert found.config == second and found.tried == len(ranked(product, REFERENCE)) - 1
    assert "out of registers" in caplog.text


def test_products_that_no_time_is_left_for_are_told():
    timer = FakeTimer({})
    found, rest = search(PRODUCTS, REFERENCE, timer, lambda: 3 - timer.clock)
    assert [f.product for f in found] == PRODUCTS[:1] and rest == PRODUCTS[1:]
    assert len(timer.calls) == 3
    assert search(PRODUCTS, REFERENCE, timer, lambda: 0.0) == ([], PRODUCTS)


def test_a_table_is_read_as_it_was_written_and_added_to():
    assert read(HERE, now=NOW) == ({}, "")
    a, b = PRODUCTS
    one, two = (
        Config(kernel="splitk_gemm", bm=32, split=3),
        Config(kernel="wgmma_gemm", bm=96, stages=7),
    )
    write(HERE, {a: entry_of(a, one, 9.0, 10.0)}, now=NOW)
    write(HERE, {b: entry_of(b, two, 9.0, 10.0)}, now=NOW)
    configs, note = read(HERE, now=NOW + datetime.timedelta(days=3, hours=5))
    assert configs == {a: one, b: two}
    assert "2 products" in note and "3 days ago" in note and str(HERE.path) in note
    write(HERE, {a: entry_of(a, two, 8.0, 10.0)}, now=NOW)
    assert read(HERE, now=NOW)[0] == {a: two, b: two}


@pytest.mark.parametrize("change", ["driver", "kernels"])
def test_a_table_of_another_driver_or_of_other_kernels_is_not_used(change):
    product = PRODUCTS[0]
    entry = entry_of(product, Config(kernel="splitk_gemm"), 9.0, 10.0)
    write(HERE, {product: entry}, now=NOW)
    other = replace(HERE, **{change: "newer"})
    configs, note = read(other, now=NOW)
    assert configs == {} and change in note and "llmpq-profile tune" in note
    write(other, {}, now=NOW)
    assert read(other, now=NOW)[0] == {}, "what the old driver was tuned for came back"


def _break(text, how):
    table = json.loads(text)
    if how == "half":
        return text[: len(text) // 2]
    if how == "empty":
        return ""
    if how == "list":
        return "[]"
    if how == "field":
        table["entries"][0]["config"]["threads"] = 3
    elif how == "value":
        table["entries"][0]["config"] |= {"scale_w": True, "stages": 3}
    else:
        del table["made"]
    return json.dumps(table)


@pytest.mark.parametrize("how", ["half", "empty", "list", "field", "value", "key"])
def test_a_broken_table_is_named_and_replaced_by_the_next_tuning(how):
    product = PRODUCTS[0]
    entries = {product: entry_of(product, Config(kernel="splitk_gemm"), 9.0, 10.0)}
    path = write(HERE, entries, now=NOW)
    path.write_text(_break(path.read_text(), how))
    configs, note = read(HERE, now=NOW)
    assert configs == {} and str(path) in note and "not used" in note
    write(HERE, entries, now=NOW)
    assert read(HERE, now=NOW)[0] == {product: Config(kernel="splitk_gemm")}


def test_ages():
    ages = {5: "less than a minute", 60: "1 minute", 7300: "2 hours", 86_400 * 9: "9 days"}
    for seconds, text in ages.items():
        assert learned.age_text(datetime.timedelta(seconds=seconds)) == text
    assert learned.age_text(datetime.timedelta(seconds=-9)) == "less than a minute"
