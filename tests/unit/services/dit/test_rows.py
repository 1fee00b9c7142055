import torch

from core.geometry import chunk_table
from services.dit.rows import audio_rows, chunk_position_ids, rows_to_audio, rows_to_video, video_rows


def test_audio_rows_are_all_of_left_then_all_of_right() -> None:
    audio = torch.zeros(1, 32, 2, 3)
    audio[0, :, 0] = torch.tensor([0.0, 1.0, 2.0])
    audio[0, :, 1] = torch.tensor([10.0, 11.0, 12.0])
    rows = audio_rows(audio)
    assert rows.shape == (6, 32)
    assert rows[:, 0].tolist() == [0, 1, 2, 10, 11, 12]


def test_video_rows_run_latent_row_column_and_features_channel_row_column() -> None:
    latents, height, width = 2, 4, 6
    channel, t, y, x = torch.meshgrid(*(torch.arange(n) for n in (24, latents, height, width)), indexing="ij")
    video = (1000 * channel + 100 * t + 10 * y + x).float()[None]
    rows = video_rows(video)
    assert rows.shape == (latents * 2 * 3, 96)
    assert rows[0, :4].tolist() == [0, 1, 10, 11]  # channel 0: its 2 x 2 patch
    assert rows[0, 4].item() == 1000
    assert rows[1, 0].item() == 2  # next patch to the right
    assert rows[3, 0].item() == 20  # next patch row
    assert rows[6, 0].item() == 100  # next latent


def test_rows_go_back_to_the_latents_they_came_from() -> None:
    video, audio = torch.randn(1, 24, 5, 4, 6), torch.randn(1, 32, 2, 29)
    assert torch.equal(rows_to_video(video_rows(video), 5, 4, 6), video)
    assert torch.equal(rows_to_audio(audio_rows(audio)), audio)


def test_positions_are_float64_and_start_behind_the_text() -> None:
    chunk = chunk_table(39)[1]
    positions = chunk_position_ids(chunk, 9, 4, 4)
    assert positions.shape == (2 * 28 + 5 * 4, 3)
    assert positions.dtype == torch.float64
    assert positions[0].tolist() == [9 + 29, 0, 0]
    assert positions[56, 0].item() == 9 + 85 / 3
