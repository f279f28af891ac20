"""What a target of transformers is tried for, by a few tokens, before anything is made of it.

B batch · S sequence · H hidden size
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eaglefeed.errors import TargetMismatch
from eaglefeed.schema.eagle3 import NUM_AUX_LAYERS

__all__ = ["Run", "check_states", "decoder_layers", "isolates_documents", "layer_output", "looks_ahead"]

Run = Callable[[Tensor, Tensor | None], Tensor]
"""[B, S] ids, and positions or None → aux states [B, S, 3H]."""

_EXACT, _ROUNDED = (1e-5, 1e-2), (1e-3, 5e-2)
"""Relative L2 of a token's states in one layer, in float32 and in 16 bits: beside each other in one forward, where only
what a token sees can move it and the rounding of experts, and in forwards of other shapes."""


def check_states(aux: Tensor, ids: Tensor, hidden_size: int, name: str) -> None:
    """Check that layers give one state a token, as wide as the target's configuration says.

    Raises:
        TargetMismatch: they do not.
    """
    wanted = [*ids.shape, NUM_AUX_LAYERS * hidden_size]
    if list(aux.shape) != wanted:
        what = "its layers give other states than one a token"
        raise TargetMismatch(what, subject=name, wanted=wanted, got=list(aux.shape))


def looks_ahead(run: Run, vocab_size: int, device: torch.device) -> bool:
    """Whether a token's states change with the tokens behind it, as padding would change them too."""
    one, other = run(_tokens([[0, 1, 2, 3], [0, 1, 4, 5]], vocab_size, device), None)
    tells = bool(one.isfinite().all() and other.isfinite().all())  # else each sample's own check says what is wrong
    return tells and not _same(one[:2], other[:2], _EXACT)


def isolates_documents(run: Run, vocab_size: int, device: torch.device) -> bool:
    """Whether a second document's states are what they are alone, whatever stands before it in its row."""
    ids = _tokens([[0, 1, 2, 5], [3, 4, 2, 5]], vocab_size, device)
    one, other = run(ids, torch.tensor([0, 1, 0, 1], device=device).expand_as(ids))[:, 2:]
    return _same(one, other, _EXACT) and _same(one, run(ids[:1, 2:], None)[0], _ROUNDED)


def _tokens(rows: list[list[int]], vocab_size: int, device: torch.device) -> Tensor:
    return torch.tensor(rows, device=device) % vocab_size


def _same(one: Tensor, other: Tensor, tolerances: tuple[float, float]) -> bool:
    """Whether states [n, 3H] are equal but for rounding, layer by layer: a later one's may be far larger."""
    mine, theirs = (states.float().view(len(states), NUM_AUX_LAYERS, -1) for states in (one, other))
    tolerance = tolerances[one.dtype.itemsize < torch.float32.itemsize]
    return bool(((mine - theirs).norm(dim=-1) <= tolerance * theirs.norm(dim=-1)).all())


def decoder_layers(backbone: nn.Module, num_layers: int) -> nn.ModuleList:
    """The outermost list of `num_layers` modules: lists inside layers (experts) lie deeper.

    Raises:
        TargetMismatch: there is none.
    """
    lists = [
        (name.count("."), module)
        for name, module in backbone.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        kind = type(backbone).__name__
        raise TargetMismatch("its decoder layers cannot be found", subject=kind, wanted=f"a list of {num_layers}")
    return min(lists, key=lambda found: found[0])[1]


def layer_output(output: Any) -> Tensor:
    """The states [B, S, H] of what a decoder layer returns: they, or a sequence that begins with them."""
    states: Tensor = output[0] if isinstance(output, tuple | list) else output
    return states
