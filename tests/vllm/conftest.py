"""One engine at a time in this process; tests of one module share it."""

from __future__ import annotations

import pytest

from tests.vllm.driver import Driver, prompt, stop_daemon
from tierkv.bench.tiny_models import make_model

LENGTHS = (1000, 900, 640, 1100)
PROMPTS = [prompt(seed, length) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="session")
def models(request):
    folder = request.config.rootpath / "build" / "models"
    return {
        "gqa": make_model(folder / "gqa-0.2", "gqa", 0.2),
        "gqa-other": make_model(folder / "gqa-other", "gqa", 0.2, seed=1),
        "mla": make_model(folder / "mla-0.06", "mla", 0.06),
    }


@pytest.fixture(scope="session")
def baseline(models):
    """Outputs of vLLM without TierKV, one result per prompt, and its own hit counts."""
    driver = Driver(models["gqa"], None)
    try:
        results = [driver.generate(tokens) for tokens in PROMPTS]
        again = [driver.generate(tokens) for tokens in PROMPTS]
        return results, again
    finally:
        driver.close()


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def make_engine(models, run_directory):
    """Starts engines one after the other; the last one is closed at the end of the module."""
    open_drivers = []

    def make(model: str = "gqa", is_alone: bool = False, **options) -> Driver:
        """`is_alone`: vLLM without TierKV."""
        while open_drivers:
            open_drivers.pop().close()
        driver = Driver(models[model], None if is_alone else run_directory, **options)
        open_drivers.append(driver)
        return driver

    yield make
    while open_drivers:
        open_drivers.pop().close()
    stop_daemon(run_directory)
