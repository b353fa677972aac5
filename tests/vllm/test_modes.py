"""Every mode gives the outputs of vLLM without TierKV, with hits; a damaged block changes them."""

from __future__ import annotations

import pytest

from tests.vllm.conftest import PROMPTS
from tests.vllm.driver import DAMAGE_MIN, TOLERANCE, difference

pytestmark = pytest.mark.vllm

MODES = [
    ("step", "async"),
    ("step", "layerwise"),
    ("layerwise", "async"),
    ("layerwise", "layerwise"),
]


@pytest.mark.parametrize(("store", "load"), MODES)
def test_outputs_are_equal_with_hits_and_change_with_a_damaged_block(
    make_engine, baseline, store, load
):
    driver = make_engine(engine={"store_mode": store, "load_mode": load})
    driver.purge()
    expected, _ = baseline
    cold = [driver.generate(tokens) for tokens in PROMPTS]
    assert [r.cached for r in cold] == [0] * len(PROMPTS)
    driver.forget_device()
    warm = [driver.generate(tokens) for tokens in PROMPTS]
    for want, first, second in zip(expected, cold, warm, strict=True):
        assert difference(want, first) <= TOLERANCE
        assert difference(want, second) <= TOLERANCE
    # 640 tokens are five full blocks: only an asynchronous load may cover the whole prompt.
    whole = 640 if load == "async" else 512
    assert [r.cached for r in warm] == [896, 896, whole, 1024]
    driver.check()

    driver.forget_device()
    driver.damage(warm[0].hashes[:3])
    hurt = driver.generate(PROMPTS[0])
    assert hurt.cached == 896
    assert difference(expected[0], hurt) > DAMAGE_MIN
    driver.check()


def test_equal_prompts_in_one_batch_are_stored_once(make_engine, baseline):
    driver = make_engine()
    driver.purge()
    before = driver.stats()["counters"]["blocks_stored"]
    results = driver.generate_all([PROMPTS[0]] * 3)
    for result in results:
        assert difference(baseline[0][0], result) <= TOLERANCE
    assert driver.stats()["counters"]["blocks_stored"] - before == 7
    driver.forget_device()
    for result in driver.generate_all([PROMPTS[0]] * 3):
        assert result.cached >= 896
        assert difference(baseline[0][0], result) <= TOLERANCE
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_hashes_and_the_devices_own_hits_are_those_of_vllm_alone(make_engine):
    driver = make_engine()
    driver.purge()
    for tokens in PROMPTS:
        driver.generate(tokens)
    hits_before = driver.device_hits()
    with_tierkv = [driver.generate(tokens) for tokens in PROMPTS]
    hits_with = driver.device_hits() - hits_before
    alone = make_engine(is_alone=True)
    names = [alone.add(tokens) for tokens in PROMPTS]
    alone.finish(names)
    hits_before = alone.device_hits()
    without = [alone.generate(tokens) for tokens in PROMPTS]
    hits_without = alone.device_hits() - hits_before
    for one, other in zip(with_tierkv, without, strict=True):
        assert one.hashes == other.hashes
        assert one.hashes
    assert hits_with == hits_without > 0


def test_a_salt_keeps_requests_apart(make_engine, baseline):
    driver = make_engine()
    driver.purge()
    driver.generate(PROMPTS[0], cache_salt="one")
    driver.forget_device()
    assert driver.generate(PROMPTS[0], cache_salt="two").cached == 0
    driver.forget_device()
    assert driver.generate(PROMPTS[0], cache_salt="one").cached == 896
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0], cache_salt="one")


@pytest.mark.parametrize(
    ("block_size", "block_tokens", "cached"),
    [(32, 32, 992), (32, 128, 896), (128, 128, 896), (128, 512, 512)],
)
def test_block_sizes(make_engine, baseline, block_size, block_tokens, cached):
    driver = make_engine(engine={"block_tokens": block_tokens}, block_size=block_size)
    driver.purge()
    first = driver.generate(PROMPTS[0])
    driver.forget_device()
    second = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], first) <= TOLERANCE
    assert difference(baseline[0][0], second) <= TOLERANCE
    assert second.cached == cached
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0], blocks=min(3, 1000 // block_tokens))


def test_a_hit_may_start_inside_a_block(make_engine, baseline):
    """The device holds 3 engine blocks, TierKV's block has 4: only the lacking ones are loaded."""
    driver = make_engine(engine={"block_tokens": 128}, block_size=32)
    driver.purge()
    driver.generate(PROMPTS[0])
    driver.forget_device()
    driver.purge()
    driver.generate(PROMPTS[0][:100], new=1)  # 3 full engine blocks on the device, nothing stored
    driver.forget_device()
    driver.generate(PROMPTS[0])  # all stored
    driver.forget_device()
    driver.generate(PROMPTS[0][:100], new=1)
    result = driver.generate(PROMPTS[0])
    assert result.cached == 896
    assert difference(baseline[0][0], result) <= TOLERANCE
    driver.check()
    # The damaged block is the very one that the device holds three quarters of.
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0], blocks=1, device_tokens=100)
