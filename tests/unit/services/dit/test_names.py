import torch
from torch import nn

from services.dit.names import official_modules, split_output_rows


def test_the_real_model_has_266_official_modules() -> None:
    modules = official_modules(50, 2)
    assert len(modules) == 266
    assert sum(len(names) for names in modules.values()) == 266 + 2 * 52  # fused attention projections are three here
    assert len({name for names in modules.values() for name in names}) == 266 + 2 * 52


def test_the_names_cover_every_linear_module_of_the_published_class_at_full_size() -> None:
    from diffusers import MiniMaxH3Transformer3DModel

    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel()
    linears = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    modules = official_modules(transformer.config.num_layers, transformer.config.num_refiner_layers)
    assert {name for names in modules.values() for name in names} == linears.keys()
    # Rank 128 on every official module is the RAVEN adapter's published parameter count.
    sizes = [(linears[names[0]].in_features, sum(linears[n].out_features for n in names)) for names in modules.values()]
    assert sum(128 * (num_in + num_out) for num_in, num_out in sizes) == 1_264_353_280


def test_names_are_translated_block_by_block() -> None:
    modules = official_modules(3, 2)
    assert modules["blocks.2.attn.qkv_proj"] == tuple(f"transformer_blocks.2.attn.to_{part}" for part in "qkv")
    assert modules["token_refiner.blocks.1.mlp.fc1"] == ("token_refiner.refiner_blocks.1.ff.net.0.proj",)
    assert modules["final_layer.adaln_proj.linear"] == ("norm_out.linear",)
    assert "token_refiner.blocks.0.adaln_proj.linear" not in modules


def test_stacked_projections_are_cut_in_three() -> None:
    rows = torch.arange(12.0).reshape(6, 2)
    parts = split_output_rows("blocks.0.attn.qkv_proj", rows)
    assert [part.tolist() for part in parts] == [rows[:2].tolist(), rows[2:4].tolist(), rows[4:].tolist()]


def test_gate_and_up_change_places() -> None:
    rows = torch.arange(4.0)[:, None]
    (swapped,) = split_output_rows("token_refiner.blocks.0.mlp.fc1", rows)
    assert swapped.flatten().tolist() == [2.0, 3.0, 0.0, 1.0]


def test_other_modules_stay_as_they_are() -> None:
    rows = torch.arange(4.0)[:, None]
    assert split_output_rows("blocks.0.mlp.fc2", rows)[0] is rows
