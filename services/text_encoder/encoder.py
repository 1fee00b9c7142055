"""Token ids to the hidden states that condition the DiT."""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def hidden_states(module: nn.Module, ids: list[int], device: torch.device) -> torch.Tensor:
    """The hidden state of every token, `[E, text_dim]` on the host in the module's dtype.

    module: the language model of `weights.py`, on `device`. It ends at the layer that H3 reads and normalises nothing
    after it, so its output is the hidden state itself.  ids: at least one.
    """
    assert ids, "an empty prompt has no hidden states"
    output = module(input_ids=torch.tensor([ids], device=device), use_cache=False)
    states: torch.Tensor = output.last_hidden_state[0]
    return states.cpu()
