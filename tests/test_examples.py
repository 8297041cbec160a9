"""Examples that are measurements: what their pages claim, with few samples."""

from __future__ import annotations

import importlib.util
import math
from types import ModuleType
from typing import Any

import pytest
from places import EXAMPLES, ROOT

SCRIPT = EXAMPLES / "keep_sampling_mask" / "bias.py"


@pytest.fixture(scope="module")
def bias() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keep_sampling_mask_bias", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TOP_PS = (0.7, 0.9)  # 0.95 and 1 have most of the sequences, and take most of the time
    return module


@pytest.fixture(scope="module")
def results(bias: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[str, Any]]:
    picture = tmp_path_factory.mktemp("examples") / "picture.png"
    found = bias.main(["--samples", str(2**15), "--repeats", "2", "--picture", str(picture)])
    assert picture.read_bytes().startswith(b"\x89PNG")
    return found


def test_ratios_are_1_with_the_mask_and_the_kept_probability_without(bias: ModuleType, results: Any) -> None:
    for top_p, found in results.items():
        ratios = found["ratios"]
        assert abs(ratios[bias.MASKED] - 1) < 1e-6 and ratios[f"{bias.MASKED}, off"] < 3e-6
        assert top_p <= ratios["kept mass"] + 1e-6 and ratios[f"{bias.MASKED}, GSPO clips"] == 0
        spread = 5 * ratios[f"{bias.UNMASKED}, error"] + 1e-6  # float32 rounding besides five standard errors
        assert abs(ratios[bias.UNMASKED] - ratios["kept mass"]) < spread
    assert results[0.7]["ratios"][bias.UNMASKED] < 0.8
    assert results[0.9]["ratios"][f"{bias.UNMASKED}, GSPO clips"] > 0.4


def test_the_gradient_is_right_with_the_mask_and_biased_without(bias: ModuleType, results: Any) -> None:
    for top_p, found in results.items():
        limits = found["gradients"]["bias"]
        assert limits[bias.MASKED] < 1e-4  # float32 sums over all sequences
        for trainer in (bias.UNMASKED, bias.RECOMPUTED):
            assert limits[trainer] > 0.25 * (1 - top_p)
    shown = results[bias.SHOWN]["gradients"]
    sizes, errors, limits = shown["sizes"], shown["errors"], shown["bias"]
    assert (sizes[0], sizes[-1]) == (2**8, 2**15)
    # A factor of 128 in samples; the rest is the noise of two runs.
    shrinks = errors[bias.MASKED][0] / errors[bias.MASKED][-1]
    assert shrinks == pytest.approx(math.sqrt(sizes[-1] / sizes[0]), rel=0.35)
    noise = errors[bias.MASKED][-1]
    for trainer in (bias.UNMASKED, bias.RECOMPUTED):
        assert limits[trainer] > 1.5 * noise  # the bias shows at this many samples already
        assert errors[trainer][-1] == pytest.approx(math.hypot(limits[trainer], noise), rel=0.2)


def test_the_page_quotes_what_the_script_prints(bias: ModuleType, results: Any) -> None:
    """The exact numbers of seed 0, which depend on no sample."""
    page = (ROOT / "docs" / "keep_sampling_mask.md").read_text()
    for top_p, found in results.items():
        ratios, gradients = found["ratios"], found["gradients"]
        (row,) = [x for x in page.splitlines() if x.startswith(f" {top_p:4.2f}  ") and "+-" in x]
        assert f"{ratios['kept mass']:.5f}" in row
        for trainer in (bias.UNMASKED, bias.RECOMPUTED):
            assert f"{gradients['bias'][trainer]:.1e} ({gradients['cosine'][trainer]:.4f})" in page
