from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLMiniMaxH3Audio
from safetensors.torch import load_file
from torch import Tensor

from core.clock import AUDIO_MARGIN_LATENTS
from core.geometry import SAMPLE_RATE, SAMPLES_PER_AUDIO_LATENT, chunk_table, num_audio_latents
from services.vae.audio_stream import AudioStream
from services.vae.weights import LatentStatistics, load_models
from tools.train_tiny.audio_vae import audio_latents, click_waveform, write_audio_vae
from tools.train_tiny.world import (
    FUNDAMENTALS,
    MOTIONS,
    PARTIALS,
    PITCHES,
    RHYTHMS,
    Scene,
    Thing,
    batch,
    click_amplitudes,
    random_scene,
    tone_amplitudes,
)

NUM_FRAMES = 39
BOUNCE, STILL = MOTIONS.index("bounce"), MOTIONS.index("still")
HUM = RHYTHMS.index("hum")


class Sound:
    """The written component as the product uses it."""

    def __init__(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        self.model = AutoencoderKLMiniMaxH3Audio.from_config(AutoencoderKLMiniMaxH3Audio.load_config(directory))
        self.model.load_state_dict(load_file(directory / "diffusion_pytorch_model.safetensors"))
        self.model.eval()
        self.statistics = LatentStatistics(tuple(config["latents_mean"]), tuple(config["latents_std"]))

    def raw(self, latents: Tensor) -> Tensor:
        """What the decoder reads, `[2, 32, A]`, of normalised latents `[32, 2, A]`."""
        mean, std = (torch.tensor(value)[:, None] for value in (self.statistics.mean, self.statistics.std))
        return latents.transpose(0, 1) * std + mean

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Samples `[2, S]` float64 of normalised latents `[32, 2, A]`."""
        waveform: Tensor = self.model.decode(self.raw(latents)).sample[:, 0].double()
        return waveform


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "audio_vae"
    write_audio_vae(path)
    return path


@pytest.fixture(scope="module")
def sound(directory: Path) -> Sound:
    torch.set_num_threads(1)
    return Sound(directory)


def one(motion: int, pitch: int, rhythm: int = 0) -> Scene:
    return Scene((Thing(0, 0, 0, motion),), 0, pitch, rhythm)


def free(*numbers: float) -> Tensor:
    """Of one scene whose first object has these two."""
    return torch.tensor([[numbers, (0.5, 0.5)]])


def amplitude(waveform: Tensor, frequency: float) -> Tensor:
    """Of the sine that starts with the waveform `[..., S]`, S a whole number of latents."""
    turns = 2 * math.pi * frequency * torch.arange(waveform.shape[-1], dtype=torch.float64) / SAMPLE_RATE
    return 2 * (waveform * torch.sin(turns)).mean(dim=-1)


def inner(waveform: Tensor) -> Tensor:
    """Without two latents at either end, where a tone fades in and out."""
    return waveform[..., 2 * SAMPLES_PER_AUDIO_LATENT : -2 * SAMPLES_PER_AUDIO_LATENT]


def synthesis(tones: Tensor, clicks: Tensor) -> Tensor:
    """Samples `[..., 2, S]` of amplitudes `[..., 7, 2, A]` and `[..., 2, A]`: those of tones joined by straight lines
    from one latent's middle to the next.
    """
    num_latents = tones.shape[-1]
    sample = torch.arange(num_latents * SAMPLES_PER_AUDIO_LATENT, dtype=torch.float64)
    place = ((sample + 0.5) / SAMPLES_PER_AUDIO_LATENT - 0.5).clamp(0, num_latents - 1)
    before = place.long().clamp(max=num_latents - 2)
    envelopes = tones[..., before] + (place - before) * (tones[..., before + 1] - tones[..., before])
    turns = 2 * math.pi * torch.tensor(PARTIALS, dtype=torch.float64)[:, None, None] * sample / SAMPLE_RATE
    click = torch.nn.functional.pad(click_waveform(), (0, SAMPLES_PER_AUDIO_LATENT - len(click_waveform())))
    return (envelopes * torch.sin(turns)).sum(dim=-3) + (clicks[..., None] * click).flatten(-2)


@pytest.mark.parametrize("pitch", range(1, len(PITCHES)))
def test_a_hum_has_the_pitch_and_the_place_of_its_object(sound: Sound, pitch: int) -> None:
    scenes = batch([one(STILL, pitch, HUM)], free(0.9, 0.5))
    wanted = tone_amplitudes(scenes, num_audio_latents(NUM_FRAMES))[0, :, :, 0]  # [7, 2]
    waveform = inner(sound.decode(audio_latents(scenes, NUM_FRAMES)[0]))
    found = torch.stack([amplitude(waveform, frequency) for frequency in PARTIALS])
    assert wanted.max(dim=0).values.min() > 0.05
    assert (found - wanted).abs().max() < 0.02 * wanted.max()
    assert torch.allclose(found[wanted > 0], wanted[wanted > 0], rtol=0.02)
    spectrum = torch.fft.rfft(waveform[0] * torch.hann_window(waveform.shape[1], dtype=torch.float64), 1 << 20).abs()
    assert int(spectrum.argmax()) * SAMPLE_RATE / (1 << 20) == pytest.approx(FUNDAMENTALS[pitch], rel=1e-3)
    pans = waveform.square().mean(dim=1).sqrt()
    left, right = wanted.norm(dim=0)
    assert float((pans[1] - pans[0]) / pans.sum()) == pytest.approx(float((right - left) / (right + left)), abs=1e-4)


def test_a_click_begins_with_its_latent_and_has_its_amplitude(sound: Sound) -> None:
    scenes = batch([one(BOUNCE, 0)], free(0.05, 0.5))  # one touch
    wanted = click_amplitudes(scenes, NUM_FRAMES, num_audio_latents(NUM_FRAMES))[0]  # [2, A]
    waveform = sound.decode(audio_latents(scenes, NUM_FRAMES)[0])
    (latent,) = wanted[0].nonzero()[0].tolist()
    start = latent * SAMPLES_PER_AUDIO_LATENT
    loud = (waveform.abs() > 0.3 * wanted[:, [latent]]).any(dim=0).nonzero()
    assert start <= int(loud[0]) < start + 0.002 * SAMPLE_RATE
    assert int(loud[-1]) < start + 0.009 * SAMPLE_RATE
    click = click_waveform()
    heard = waveform[:, start : start + len(click)] @ click / click.square().sum()
    assert torch.allclose(heard, wanted[:, latent], rtol=0.02)
    rest = waveform.clone()
    rest[:, start - 20 : start + len(click) + 20] = 0.0
    assert rest.abs().max() < 1e-3


def test_a_click_is_no_tone() -> None:
    click = click_waveform()
    turns = 2 * math.pi * torch.arange(len(click), dtype=torch.float64) / SAMPLE_RATE
    share = [float((click @ wave(f * turns)).abs()) for f in (0.0, *PARTIALS) for wave in (torch.cos, torch.sin)]
    assert max(share) < 1e-4
    power = torch.fft.rfft(click, SAMPLE_RATE // 10).abs().square()  # bins of 10 Hz
    assert power[200:600].sum() > 0.9 * power.sum()
    assert click.abs().max() == 1.0


def test_every_scene_sounds_as_synthesised_directly(sound: Sound) -> None:
    generator = torch.Generator().manual_seed(3)
    scenes = batch(
        [random_scene(generator) for _ in range(12)], torch.rand((12, 2, 2), generator=generator, dtype=torch.float64)
    )
    num_latents = num_audio_latents(NUM_FRAMES)
    tones = tone_amplitudes(scenes, num_latents)
    clicks = click_amplitudes(scenes, NUM_FRAMES, num_latents)
    wanted = inner(synthesis(tones, clicks))
    found = inner(torch.stack([sound.decode(latents) for latents in audio_latents(scenes, NUM_FRAMES)]))
    heard = wanted.square().mean(dim=(1, 2)).sqrt()
    error = (found - wanted).square().mean(dim=(1, 2)).sqrt()
    assert (heard > 0.01).sum() >= 6
    worst = float((error / heard)[heard > 0.01].max())
    print(f"largest RMS error of a scene: {worst:.2%}")
    assert worst < 0.02
    assert error[heard == 0].max() < 1e-6


def test_silence_is_silent(sound: Sound) -> None:
    assert sound.decode(audio_latents(batch([one(STILL, 0)], free(0.5, 0.5)), NUM_FRAMES)[0]).abs().max() < 1e-6


def test_the_loudest_scene_stays_below_full_scale(sound: Sound) -> None:
    two = [Scene((Thing(0, 0, 0, BOUNCE), Thing(0, 0, 0, BOUNCE)), 0, pitch, HUM) for pitch in range(1, len(PITCHES))]
    together = torch.tensor([[[0.2, 0.0], [0.2, 0.0]], [[0.2, 1.0], [0.2, 1.0]], [[0.2, 0.0], [0.2, 1.0]]])
    peaks = [
        float(sound.decode(audio_latents(batch([scene], numbers[None]), NUM_FRAMES)[0]).abs().max())
        for scene in two
        for numbers in together
    ]
    assert 0.6 < max(peaks) < 0.9


def test_latents_are_of_moderate_size_and_lean_to_neither_side() -> None:
    generator = torch.Generator().manual_seed(4)
    count = 300
    scenes = batch([random_scene(generator) for _ in range(count)], torch.rand((count, 2, 2), generator=generator))
    latents = audio_latents(scenes, NUM_FRAMES)
    assert latents.shape == (count, 32, 2, num_audio_latents(NUM_FRAMES))
    assert latents.dtype == torch.float32
    tones = latents[:, :28]
    assert tones.mean(dim=(0, 2, 3)).abs().max() < 0.2
    assert ((tones.std(dim=(0, 2, 3)) > 0.5) & (tones.std(dim=(0, 2, 3)) < 1.0)).all()
    assert latents.abs().max() < 4.5


def test_the_statistics_undo_the_normalisation(sound: Sound) -> None:
    scenes = batch([one(BOUNCE, 2, HUM)], free(0.2, 0.8))
    num_latents = num_audio_latents(NUM_FRAMES)
    amplitudes = torch.cat(
        (tone_amplitudes(scenes, num_latents)[0], click_amplitudes(scenes, NUM_FRAMES, num_latents)), dim=0
    )
    with torch.no_grad():
        read = sound.model.dec_in_proj(sound.raw(audio_latents(scenes, NUM_FRAMES)[0]))  # [2, 32, A]
    assert torch.allclose(read[:, :8].double(), amplitudes.transpose(0, 1), atol=1e-6)


def test_errors_of_the_latents_stay_small(sound: Sound) -> None:
    scenes = batch([one(BOUNCE, 2, HUM)], free(0.2, 0.5))
    latents = audio_latents(scenes, NUM_FRAMES)[0]
    noise = 0.03 * torch.randn(latents.shape, generator=torch.Generator().manual_seed(6))
    clean, noisy = inner(sound.decode(latents)), inner(sound.decode(latents + noise))
    for frequency in PARTIALS:
        assert (amplitude(noisy, frequency) - amplitude(clean, frequency)).abs().max() < 0.01 * clean.abs().max()
    assert (noisy - clean).square().mean().sqrt() < 0.03 * clean.square().mean().sqrt()


def test_a_clip_decoded_as_it_grows_is_the_clip_decoded_at_once(sound: Sound) -> None:
    num_frames = 73
    latents = audio_latents(batch([one(BOUNCE, 2, HUM)], free(0.2, 0.5)), num_frames)
    stream = AudioStream(sound.model, sound.statistics, torch.device("cpu"), num_audio_latents(num_frames))
    pieces = [stream.push(latents[..., chunk.audio_start : chunk.audio_stop]) for chunk in chunk_table(num_frames)]
    assert (torch.cat(pieces, dim=1) - sound.decode(latents[0])).abs().max() < 1e-6


def test_a_latent_is_heard_in_its_neighbours_at_most(sound: Sound) -> None:
    latents = torch.zeros(32, 2, 9)
    other = latents.clone()
    other[..., 4] = 1.0
    changed = (sound.decode(other) - sound.decode(latents)).abs().amax(dim=0).view(9, SAMPLES_PER_AUDIO_LATENT)
    assert changed[[0, 1, 2, 6, 7, 8]].max() < 1e-6
    assert AUDIO_MARGIN_LATENTS >= 2


def test_the_files_are_small_and_the_same_every_time(directory: Path, tmp_path: Path) -> None:
    write_audio_vae(tmp_path / "again")
    names = sorted(path.name for path in directory.iterdir())
    assert names == ["config.json", "diffusion_pytorch_model.safetensors"]
    for name in names:
        first, second = ((path / name).read_bytes() for path in (directory, tmp_path / "again"))
        assert hashlib.sha256(first).digest() == hashlib.sha256(second).digest(), name
    assert sum(path.stat().st_size for path in directory.iterdir()) < 0.92e6


def test_the_encoder_finds_the_latents_of_a_sound(sound: Sound) -> None:
    scenes = batch(
        [one(BOUNCE, pitch, rhythm) for pitch, rhythm in ((1, 0), (2, 1), (3, 2))], free(0.2, 0.9).expand(3, 2, 2)
    )
    for latents in audio_latents(scenes, NUM_FRAMES):
        raw = sound.raw(latents)
        with torch.no_grad():
            found = sound.model.encode(sound.model.decode(raw).sample).latent_dist.mode()
        error = ((found - raw) / torch.tensor(sound.statistics.std)[:, None]).abs()  # [2, 32, A]
        assert error[..., 1:-1].max() < 1e-3
        assert error.max() < 0.2  # the neighbour beyond an end is missing


def test_the_product_loads_it_and_plays_the_same(directory: Path, tiny_model: Path, sound: Sound) -> None:
    models = load_models(tiny_model, torch.float32, audio_path=directory)
    assert models.audio_statistics == sound.statistics
    latents = audio_latents(batch([one(BOUNCE, 2, HUM)], free(0.2, 0.5)), NUM_FRAMES)[0]
    with torch.no_grad():
        played = models.audio.decode(sound.raw(latents)).sample[:, 0]
    assert (played - sound.decode(latents)).abs().max() < 1e-6
