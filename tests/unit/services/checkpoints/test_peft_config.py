from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.checkpoints.peft_config import is_alpha, read_peft_config

PUBLISHED: dict[str, Any] = {
    "alpha_pattern": {},
    "auto_mapping": None,
    "base_model_name_or_path": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": "gaussian",
    "layer_replication": None,
    "loftq_config": {},
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "lora_bias": False,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 8,
    "rank_pattern": {},
    "target_modules": ["to_q", "to_k"],
    "use_dora": False,
    "use_rslora": False,
}


def test_a_published_configuration_is_read() -> None:
    config = read_peft_config(PUBLISHED)
    assert (config.alpha_of("any.module"), config.rank_of("any.module")) == (16, 8)


def test_an_empty_one_says_nothing() -> None:
    config = read_peft_config({})
    assert (config.alpha_of("to_q"), config.rank_of("to_q")) == (None, None)


def test_the_first_pattern_that_is_a_module_or_its_end_has_the_say() -> None:
    module = "transformer_blocks.1.attn.to_q"
    patterns = {f"^{module}": 1, "to_out.0": 2, "attn.to_q": 3, module: 4}
    config = read_peft_config({"lora_alpha": 9, "alpha_pattern": patterns, "rank_pattern": patterns, "r": 7})
    assert config.alpha_of(module) == 1
    assert config.alpha_of("token_refiner.refiner_blocks.0.attn.to_out.0") == 2
    assert config.alpha_of("transformer_blocks.2.attn.to_q") == 3
    assert config.alpha_of("transformer_blocks.2.xattn.to_q") == 9  # an end is made of whole names
    assert config.rank_of("attn.to_q") == 3
    assert config.rank_of("proj_in") == 7


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "has use_dora True: it is a DoRA"),
        ({"use_rslora": True}, r"alpha / sqrt\(rank\)"),
        ({"bias": "all"}, "has the bias 'all'"),
        ({"lora_bias": True}, "it has biases"),
        ({"peft_type": "LOHA"}, "has the peft_type 'LOHA'; only LORA"),
        ({"modules_to_save": ["proj_out"]}, "it replaces whole modules"),
        ({"layer_replication": [[0, 4]]}, "it repeats layers"),
        ({"init_lora_weights": "pissa_niter_4"}, "base weights that were changed"),
        ({"lora_alpha": "16"}, "an alpha of '16'; it must be a number above 0"),
        ({"lora_alpha": True}, "an alpha of True"),
        ({"lora_alpha": 0}, "an alpha of 0"),
        ({"r": 8.5}, "a rank of 8.5; it must be an integer above 0"),
        ({"alpha_pattern": [1]}, "it must map names to numbers"),
        ({"alpha_pattern": {"(a+)+$": 4}}, r"the pattern '\(a\+\)\+\$'; names of modules"),
        ({"rank_pattern": {"to_q": -1}}, "a rank of -1"),
    ],
)
def test_what_makes_another_update_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_peft_config(PUBLISHED | change)


def test_ten_thousand_patterns_cost_no_more_than_a_look_up_each() -> None:
    config = read_peft_config({"alpha_pattern": {f"blocks.{i}.to_q": i + 1 for i in range(10_000)}})
    assert [config.alpha_of(f"blocks.{i}.to_q") for i in range(10_000)] == list(range(1, 10_001))


@pytest.mark.parametrize(
    ("value", "is_one"),
    [(1.0, True), (1e6, True), (0.0, False), (-1.0, False), (1e308, False), (float("nan"), False)],
)
def test_an_alpha_is_above_0_and_small_enough_to_scale_with(value: float, is_one: bool) -> None:
    assert is_alpha(value) is is_one


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*PUBLISHED, "alpha"]), JSON, max_size=6), st.text(max_size=30))
def test_whatever_the_json_it_is_read_or_refused(values: dict[str, Any], module: str) -> None:
    try:
        config = read_peft_config(values)
    except ValueError as error:
        told = str(error)
    else:
        told = ""
        for value in (config.alpha_of(module), config.rank_of(module)):
            assert value is None or is_alpha(value)
    assert len(told) < 400
