from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from h3stream.errors import DeviceMemoryError, InvalidRequestError, UnsupportedError
from services.common.ledger import read_ledger
from services.common.verbs import VerbCancelled
from services.text_encoder.config import TextEncoderConfig
from services.text_encoder.worker import TextEncoderWorker
from tests.text_encoder_files import nvfp4_state, write_comfyui, write_nvfp4

PROMPT = "A red fox trots through snow; she says: <d>[English] Hello.</d>"


def present() -> bool:
    """The caller is still there."""
    return False


@pytest.fixture
def worker(tiny_model: Path) -> TextEncoderWorker:
    torch.set_num_threads(1)
    return TextEncoderWorker(TextEncoderConfig(model_directory=tiny_model, device="cpu"))


def test_encoding_needs_the_phase_and_looking_up_does_not(worker: TextEncoderWorker) -> None:
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        worker.encode(PROMPT, present)
    assert worker.lookup(PROMPT) is None
    worker.weights.enter()
    fresh, was_cached = worker.encode(PROMPT, present)
    assert not was_cached
    worker.weights.leave()
    assert worker.lookup(PROMPT) is fresh
    with pytest.raises(UnsupportedError):
        worker.encode(PROMPT, present)


def test_a_prompt_gives_a_hidden_state_and_a_text_tag_for_every_token(worker: TextEncoderWorker) -> None:
    worker.weights.enter()
    embedding, _ = worker.encode(PROMPT, present)
    num_tokens = len(embedding.token_tags)
    assert embedding.context.shape == (num_tokens, 128)
    assert embedding.context.dtype == torch.bfloat16
    assert embedding.token_tags.tolist() == [1] * num_tokens
    assert embedding.context.isfinite().all()
    # The encoder is causal: a prompt that goes on begins with the same hidden states, up to how sums are split.
    longer, _ = worker.encode(PROMPT + " The end.", present)
    torch.testing.assert_close(longer.context[:num_tokens], embedding.context, rtol=0.02, atol=0.02)


def test_cached_and_fresh_hidden_states_are_the_same_bits(tiny_model: Path, worker: TextEncoderWorker) -> None:
    worker.weights.enter()
    first, _ = worker.encode(PROMPT, present)
    second, was_cached = worker.encode(PROMPT, present)
    assert was_cached
    assert second is first
    config = TextEncoderConfig(model_directory=tiny_model, device="cpu", embedding_cache_bytes=0)
    forgetful = TextEncoderWorker(config)
    for _ in range(2):  # also after the weights have left the device and come back
        forgetful.weights.enter()
        again, was_cached = forgetful.encode(PROMPT, present)
        assert not was_cached
        assert torch.equal(again.context, first.context)
        forgetful.weights.leave()


def test_a_bad_prompt_is_refused_before_the_phase_is_asked_for(worker: TextEncoderWorker) -> None:
    for verb in (lambda: worker.encode("<|image_pad|>", present), lambda: worker.lookup("")):
        with pytest.raises(InvalidRequestError) as raised:
            verb()
        assert [v.field for v in raised.value.violations] == ["prompt"]


def test_a_prompt_of_more_tokens_than_the_encoder_has_positions_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(tiny_model / "text_encoder", tmp_path / "text_encoder")
    path = directory / "config.json"
    stored = json.loads(path.read_text())
    stored["text_config"]["max_position_embeddings"] = 20
    path.write_text(json.dumps(stored))
    worker = TextEncoderWorker(TextEncoderConfig(model_directory=tiny_model, text_encoder=directory, device="cpu"))
    worker.weights.enter()
    assert len(worker.encode("0" * 20, present)[0].token_tags) == 20
    with pytest.raises(InvalidRequestError) as raised:
        worker.encode("0" * 21, present)
    (violation,) = raised.value.violations
    assert (violation.field, violation.reason) == ("prompt", "PROMPT_TOO_LONG")
    assert violation.description == "the prompt has 21 tokens; the text encoder was made for at most 20"


def test_encoder_and_tokenizer_may_lie_elsewhere(tiny_model: Path, tmp_path: Path, worker: TextEncoderWorker) -> None:
    state = load_file(tiny_model / "text_encoder" / "model.safetensors")
    file = write_comfyui(tmp_path / "encoder.safetensors", state, num_layers=4)
    tokenizer = shutil.copytree(tiny_model / "tokenizer", tmp_path / "words")
    mixed = TextEncoderWorker(TextEncoderConfig(text_encoder=file, tokenizer=tokenizer, device="cpu"))
    worker.weights.enter()
    mixed.weights.enter()
    assert torch.equal(mixed.encode(PROMPT, present)[0].context, worker.encode(PROMPT, present)[0].context)
    assert list(mixed.weight_digests) == ["text_encoder/encoder.safetensors"]
    assert [(part.component, part.layout, part.source) for part in mixed.parts] == [
        ("text_encoder", "comfyui", "encoder.safetensors")
    ]


def test_a_quantised_encoder_enters_and_leaves_packed(tiny_model: Path, tmp_path: Path) -> None:
    state = load_file(tiny_model / "text_encoder" / "model.safetensors")
    floats = {key: tensor.float() for key, tensor in state.items()}
    file = write_nvfp4(tmp_path / "encoder.safetensors", nvfp4_state(floats, 4), num_layers=4)
    config = TextEncoderConfig(model_directory=tiny_model, text_encoder=file, device="cpu")
    worker = TextEncoderWorker(config)
    (part,) = worker.parts
    assert worker.weights.host_bytes < 0.4 * 2 * part.num_parameters  # of bfloat16
    worker.weights.enter()
    first, _ = worker.encode(PROMPT, present)
    assert first.context.dtype == torch.bfloat16
    assert worker.weights.device_bytes == worker.weights.host_bytes
    worker.weights.leave()
    forgetful = TextEncoderWorker(replace(config, embedding_cache_bytes=0))
    forgetful.weights.enter()
    assert torch.equal(forgetful.encode(PROMPT, present)[0].context, first.context)


def test_nothing_is_computed_for_a_caller_who_has_gone(worker: TextEncoderWorker) -> None:
    worker.weights.enter()
    with pytest.raises(VerbCancelled):
        worker.encode(PROMPT, lambda: True)
    assert worker.lookup(PROMPT) is None


def test_a_full_device_is_a_typed_error_and_the_next_prompt_is_encoded(worker: TextEncoderWorker) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker.weights.enter()
    hook = worker._module.register_forward_pre_hook(fail)
    with pytest.raises(DeviceMemoryError, match="while encoding 1 tokens: CUDA out of memory"):
        worker.encode("a", present)
    hook.remove()
    assert worker.lookup("a") is None
    assert len(worker.encode("a", present)[0].token_tags) == 1


def test_only_phases_are_written_to_the_ledger(tiny_model: Path, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    config = TextEncoderConfig(model_directory=tiny_model, device="cpu", ledger=ledger)
    worker = TextEncoderWorker(config)
    worker.weights.enter()
    worker.encode(PROMPT, present)
    worker.weights.leave()
    worker.lookup(PROMPT)
    assert [(e.worker, e.event) for e in read_ledger(ledger)] == [("text_encoder", "enter"), ("text_encoder", "leave")]
    assert [e.device_weight_bytes for e in read_ledger(ledger)] == [worker.weights.host_bytes, 0]


def test_the_worker_names_the_file_that_its_weights_came_from(worker: TextEncoderWorker) -> None:
    assert list(worker.weight_digests) == ["text_encoder/model.safetensors"]
    assert worker.session_ids() == []
