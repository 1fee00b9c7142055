from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from h3stream.errors import CheckpointError, DeviceMemoryError, InvalidRequestError, UnsupportedError
from h3stream.request import ClipSpec
from services.common.ledger import read_ledger
from services.common.verbs import VerbCancelled
from services.dit.config import DitConfig
from services.dit.worker import DitWorker
from tests.raven_vectors import FIXTURES


def never() -> bool:
    return False


def always() -> bool:
    return True


def ignore(step: int, num_steps: int) -> None:
    pass


@pytest.fixture
def session(worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor) -> DitWorker:
    worker.open_session("s", clip, context, token_tags, never)
    return worker


def test_weights_digests_and_the_device_are_described(worker: DitWorker) -> None:
    assert worker.weight_digests.keys() == {
        "transformer/diffusion_pytorch_model.safetensors",
        "adapters/raven.safetensors",
    }
    transformer_bytes = sum(p.nbytes for p in worker._model.transformer.parameters())
    adapter_bytes = sum(p.nbytes for p in worker._adapters.parameters())
    rope_bytes = 16 * 4
    assert worker.weights.device_bytes == transformer_bytes + adapter_bytes + rope_bytes


def test_an_adapter_can_be_named_in_the_settings(model_directory: Path) -> None:
    named = DitConfig(model_directory, device="cpu", adapter=FIXTURES / "lora_extra.safetensors")
    with pytest.raises(CheckpointError, match="0 of 31 modules matched"):  # it is there, but no RAVEN adapter
        DitWorker(named)


def test_a_chunk_is_sampled_once_and_sent_as_often_as_asked(session: DitWorker) -> None:
    steps: list[tuple[int, int]] = []
    first = session.sample_chunk("s", 0, lambda done, total: steps.append((done, total)), never)
    assert steps == [(1, 2), (2, 2)]
    assert first.video.shape == (1, 24, 5, 2, 4)
    assert first.audio.shape == (1, 32, 2, 29)
    again = session.sample_chunk("s", 0, lambda done, total: steps.append((done, total)), never)
    assert len(steps) == 2
    assert torch.equal(again.video, first.video)
    session.commit_chunk("s", 0, never)
    assert torch.equal(session.sample_chunk("s", 0, ignore, never).audio, first.audio)


def test_a_commit_repeated_changes_nothing(session: DitWorker) -> None:
    session.sample_chunk("s", 0, ignore, never)
    first = session.commit_chunk("s", 0, never)
    assert (first.num_committed, first.retained, first.retained_rows) == (2, (0, 1), 5 + 2 * 29 + 5 * 2)
    assert session.commit_chunk("s", 0, never) == first
    stats = session.close_session("s")
    assert stats is not None
    assert (stats.num_noise_forwards, stats.num_clean_forwards) == (2, 1)


def test_repeated_calls_need_no_weights_and_new_ones_do(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    first = session.sample_chunk("s", 0, ignore, never)
    session.commit_chunk("s", 0, never)
    session.weights.leave()
    assert torch.equal(session.sample_chunk("s", 0, ignore, never).video, first.video)
    assert session.commit_chunk("s", 0, never).num_committed == 2
    session.open_session("s", clip, context, token_tags, never)
    for call in (
        lambda: session.sample_chunk("s", 1, ignore, never),
        lambda: session.open_session("t", clip, context, token_tags, never),
    ):
        with pytest.raises(UnsupportedError, match="enter the phase first"):
            call()
    session.weights.enter()
    session.sample_chunk("s", 1, ignore, never)
    session.weights.leave()
    with pytest.raises(UnsupportedError, match="enter the phase first"):
        session.commit_chunk("s", 1, never)


def test_leaving_the_phase_between_calls_changes_no_bit(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    session.open_session("through", clip, context, token_tags, never)
    for index in range(5):
        for name in ("s", "through"):
            if name == "s":
                session.weights.leave()
                session.weights.enter()
            session.sample_chunk(name, index, ignore, never)
        ours, theirs = (session.sample_chunk(name, index, ignore, never) for name in ("s", "through"))
        assert torch.equal(ours.video, theirs.video)
        assert torch.equal(ours.audio, theirs.audio)
        if index < 4:
            session.commit_chunk("s", index, never)
            session.commit_chunk("through", index, never)


def test_opening_again_with_the_same_clip_changes_nothing_and_with_another_is_refused(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    session.sample_chunk("s", 0, ignore, never)
    session.commit_chunk("s", 0, never)
    assert session.open_session("s", clip, context, token_tags, never).num_committed == 2
    with pytest.raises(InvalidRequestError, match="open with another clip"):
        session.open_session("s", dataclasses.replace(clip, seed=9), context, token_tags, never)
    assert session.session_ids() == ["s"]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_frames": 40}, "num_frames"),
        ({"width": 33}, "width"),
        ({"steps": 0}, "steps"),
        ({"audio_shift": 0.0}, "audio_shift"),
        ({"sink": 0}, "sink"),
        ({"window": -1}, "window"),
    ],
)
def test_a_clip_that_cannot_be_made_is_refused_before_anything_runs(
    worker: DitWorker,
    clip: ClipSpec,
    context: torch.Tensor,
    token_tags: torch.Tensor,
    change: dict[str, int],
    field: str,
) -> None:
    worker.weights.leave()
    with pytest.raises(InvalidRequestError) as raised:
        worker.open_session("s", dataclasses.replace(clip, **change), context, token_tags, never)
    assert [violation.field for violation in raised.value.violations] == [field]
    assert worker.session_ids() == []


def test_tags_must_fit_the_tokens(worker: DitWorker, clip: ClipSpec, context: torch.Tensor) -> None:
    with pytest.raises(InvalidRequestError, match="context has 5 tokens and token_tags 4"):
        worker.open_session("s", clip, context, torch.ones(4, dtype=torch.int64), never)
    with pytest.raises(InvalidRequestError, match=r"token_tags holds \[-1, 3\]; allowed are \[0, 1, 2\]"):
        worker.open_session("s", clip, context, torch.tensor([1, 3, -1, 0, 2]), never)


def test_cancelled_calls_leave_the_session_usable(
    session: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(VerbCancelled):
        session.open_session("late", clip, context, token_tags, always)
    assert session.session_ids() == ["s"]
    with pytest.raises(VerbCancelled):
        session.sample_chunk("s", 0, ignore, always)
    session.sample_chunk("s", 0, ignore, never)
    with pytest.raises(VerbCancelled):
        session.commit_chunk("s", 0, always)
    assert session.commit_chunk("s", 0, never).num_committed == 2
    assert session.close_session("s") is not None


def test_a_session_needs_a_name(
    worker: DitWorker, clip: ClipSpec, context: torch.Tensor, token_tags: torch.Tensor
) -> None:
    with pytest.raises(InvalidRequestError, match="session_id is empty"):
        worker.open_session("", clip, context, token_tags, never)
    assert worker.session_ids() == []


def test_calls_without_a_session_are_refused_and_closing_one_is_not(worker: DitWorker) -> None:
    with pytest.raises(UnsupportedError, match="no session 'ghost'"):
        worker.sample_chunk("ghost", 0, ignore, never)
    with pytest.raises(UnsupportedError, match="no session 'ghost'"):
        worker.commit_chunk("ghost", 0, never)
    assert worker.close_session("ghost") is None


def test_running_out_of_device_memory_is_a_typed_error_and_the_session_survives(session: DitWorker) -> None:
    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    hook = session._model.transformer.transformer_blocks[1].norm2.register_forward_pre_hook(fail)
    with pytest.raises(DeviceMemoryError, match="while sampling chunk 0"):
        session.sample_chunk("s", 0, ignore, never)
    hook.remove()
    session.sample_chunk("s", 0, ignore, never)


def test_phases_are_recorded_in_the_ledger(model_directory: Path, tmp_path: Path) -> None:
    worker = DitWorker(DitConfig(model_directory, device="cpu", ledger=tmp_path / "ledger"))
    worker.weights.enter()
    worker.weights.leave()
    entries = read_ledger(tmp_path / "ledger")
    assert [(entry.worker, entry.event) for entry in entries] == [("dit", "enter"), ("dit", "leave")]
    assert entries[0].device_weight_bytes == worker.weights.host_bytes
