from __future__ import annotations

import torch

from tools.train_tiny.lessons import beginnings
from tools.train_tiny.training import generator
from tools.train_tiny.world import batch, goes_in_cycles, random_scene


def test_free_numbers_follow_from_normal_numbers() -> None:
    random = generator(0, "test")
    scenes = batch([random_scene(random) for _ in range(3000)], torch.rand(3000, 2, 2, generator=random))
    numbers = beginnings(scenes, random)
    assert numbers.mean(0).abs().max() < 0.06
    assert (numbers.std(0) - 1).abs().max() < 0.05
    assert torch.corrcoef(numbers.T).sub(torch.eye(6)).abs().max() < 0.06

    first, second, third = numbers.double().unflatten(1, (2, 3)).unbind(-1)
    share = torch.special.ndtr
    turned = torch.atan2(second, first) / (2 * torch.pi) + 0.5
    found = torch.stack((torch.where(goes_in_cycles(scenes), turned, share(second)), share(third)), -1)
    assert torch.allclose(found, scenes.free, atol=1e-5)
