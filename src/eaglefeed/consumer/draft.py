"""A reference EAGLE-3 draft: one decoder layer that reads the target's aux hidden states.

B batch · S sequence · H hidden size · V target vocabulary · D draft vocabulary · K ttt_steps · x tokens · a aux states

What supervises what, for position t and step k (from 0), in the contract's shifted tensors:

    reads      x[t+1+k] = input_ids[t+k], and a[t] (k = 0) or its own output of step k - 1 at t
    sits at    position t + k, and attends to the step-0 keys of 0..t and its own keys of steps 1..k at t
    predicts   x[t+2+k], supervised by row t + k of the shifted supervision

So step k is a slice, not another shift: hidden[:, :S-k] reads input_ids[:, k:] and is scored against row k: of the
supervision. That is what a server does, where step k follows the verified positions 0..t with k tokens of its own.
"""

import torch
from torch import Tensor, nn

from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.draft_layers import DraftCache, KeyValue, Layer, Norm, Rotary
from eaglefeed.consumer.loss import DraftOutput, project_supervision, unroll_loss
from eaglefeed.errors import SchemaError

__all__ = ["Eagle3Draft"]

_QUIET = 0.1
"""Scale of the weights that add to the residual: the draft starts near what the target has said, not near noise."""
_COLD = 0.3
"""The untrained draft guesses wrongly and must not be sure of it: at the norm's full size, the first hundred steps of a
run go into unlearning that (held-out accuracy 0.28 against 0.25 after 160 conversations of the demo)."""


class Eagle3Draft(nn.Module):
    """The draft, with the parameter names that servers load.

    The target's embeddings [V, H] and t2d [V] are buffers outside the state dict: they never train and are not saved.

    Args:
        config: its sizes.
        seed: of the random weights.
    """

    embed_tokens: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.fc = nn.Linear(3 * size, size, bias=False)
        self.midlayer = Layer(config)
        self.norm = Norm(size, config.rms_norm_eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.register_buffer("embed_tokens", torch.zeros(config.vocab_size, size), persistent=False)
        self.register_buffer("t2d", torch.arange(config.vocab_size) < config.draft_vocab_size, persistent=False)
        self._draw_weights(torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _draw_weights(self, generator: torch.Generator) -> None:
        """Random weights, but the residual starts as the last aux layer's output with little added to it."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
        for quiet in (self.fc, self.midlayer.self_attn.o_proj, self.midlayer.mlp.down_proj):
            quiet.weight.mul_(_QUIET)
        self.fc.weight[:, -self.config.hidden_size :].diagonal().add_(_QUIET)
        # Keys like their queries: each position looks at itself first, whose token is the one to go on from. Otherwise
        # a run's first hundred steps go into finding it (held-out accuracy 0.24 against 0.22 after 460 conversations).
        attention = self.midlayer.self_attn
        of_head = attention.q_proj.weight.view(attention.kv_heads, -1, attention.head_dim, 2 * self.config.hidden_size)
        attention.k_proj.weight.copy_(of_head.sum(1).flatten(0, 1))

    @torch.no_grad()
    def initialize_from_target(
        self, *, embed_tokens: Tensor, lm_head: Tensor, t2d: Tensor, norm: Tensor | None = None
    ) -> None:
        """Take over what the target knows already.

        Args:
            embed_tokens: [V, H] the target's input embeddings.
            lm_head: [V, H] the target's head; its rows of the draft vocabulary start the draft's.
            t2d: [V] bool, D of them true, in the order of the draft's ids.
            norm: [H] weight of the target's final norm.

        Raises:
            SchemaError: a shape that is not the draft's.
        """
        table = (self.config.vocab_size, self.config.hidden_size)
        _require("embed_tokens", tuple(embed_tokens.shape), table)
        _require("lm_head", tuple(lm_head.shape), table)
        _require("t2d", (*t2d.shape, int(t2d.sum())), (self.config.vocab_size, self.config.draft_vocab_size))
        if t2d.dtype != torch.bool:
            raise SchemaError("t2d is no mask", wanted="bool [V]", got=str(t2d.dtype))
        self.embed_tokens.copy_(embed_tokens)
        self.t2d.copy_(t2d)
        self.lm_head.weight.copy_(lm_head[t2d])
        # The head's rows expect states that were scaled by the final norm: without its weight they read noise.
        if norm is not None:
            self.norm.weight.copy_(norm * _COLD)

    def forward(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        loss_mask: Tensor,
        aux_hidden_states: Tensor,
        target_logits: Tensor | None = None,
        target_probs: Tensor | None = None,
        position_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
        doc_remaining: Tensor | None = None,
    ) -> DraftOutput:
        """Sums of loss and accuracy over a batch; takes `batch.to_trainer_inputs()`, shapes as in the contract."""
        hidden = self.unroll(
            input_ids=input_ids,
            attention_mask=attention_mask,
            aux_hidden_states=aux_hidden_states,
            position_ids=position_ids,
            seq_lens=seq_lens,
        )
        supervision = project_supervision(
            loss_mask=loss_mask,
            t2d=self.t2d,
            target_logits=target_logits,
            target_probs=target_probs,
            position_mask=position_mask,
        )
        return unroll_loss(hidden, self.logits, supervision, doc_remaining)

    def unroll(
        self,
        *,
        input_ids: Tensor,
        attention_mask: Tensor,
        aux_hidden_states: Tensor,
        position_ids: Tensor | None = None,
        seq_lens: Tensor | None = None,
    ) -> list[Tensor]:
        """The K steps of training-time test: the layer's output of step k, [B, S - k, H] each."""
        length = input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device)[None] if position_ids is None else position_ids
        mask = _visible(attention_mask, seq_lens)
        hidden, steps = self.fuse(aux_hidden_states), []
        real: KeyValue | None = None
        own: list[KeyValue] = []
        for k in range(self.config.ttt_steps):
            n = max(length - k, 0)
            hidden = hidden[:, :n]
            rotary = Rotary.at(positions[:, :n] + k, self.config)
            q, kv = self.midlayer.project(self._embed(input_ids[:, k:]), hidden, rotary)
            if real is None:
                real = kv
            else:
                own.append(kv)
            own = [KeyValue(*(tensor[:, :, :n] for tensor in pair)) for pair in own]
            shared = KeyValue(*(tensor[:, :, :n] for tensor in real))
            hidden = self.midlayer.finish(hidden, self.midlayer.self_attn.attend(q, shared, mask[..., :n, :n], own))
            steps.append(hidden)
        return steps

    def fuse(self, aux_hidden_states: Tensor) -> Tensor:
        """The layer's first hidden states [B, n, H] of aux hidden states [B, n, 3H] of any float dtype."""
        out: Tensor = self.fc(aux_hidden_states.to(self.fc.weight.dtype))
        return out

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., D] of the layer's outputs [..., H]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out

    def new_cache(self, batch_size: int) -> DraftCache:
        """An empty cache for `extend`."""
        device = self.fc.weight.device
        empty = torch.zeros(batch_size, self.config.num_key_value_heads, 0, self.config.head_dim, device=device)
        return DraftCache(empty, empty, torch.zeros(batch_size, 0, dtype=torch.bool, device=device))

    def extend(
        self, input_ids: Tensor, hidden: Tensor, positions: Tensor, cache: DraftCache, valid: Tensor | None = None
    ) -> Tensor:
        """Decode n more positions over the cache, as a server does, and add them to it.

        Args:
            input_ids: [B, n] the token after each position.
            hidden: [B, n, H] from `fuse`, or this call's last output.
            positions: [B, n] where they stand.
            cache: what came before.
            valid: [B, n] bool, false for padding; all true by default.

        Returns:
            The layer's outputs, [B, n, H]; undefined where padding stands.
        """
        n, before = input_ids.shape[1], cache.length
        q, kv = self.midlayer.project(self._embed(input_ids), hidden, Rotary.at(positions, self.config))
        cache.append(kv, torch.ones_like(input_ids, dtype=torch.bool) if valid is None else valid)
        seen = torch.ones(n, cache.length, dtype=torch.bool, device=q.device).tril(before)
        itself = torch.zeros_like(seen)
        itself[:, before:].fill_diagonal_(fill_value=True)
        mask = (seen & cache.valid[:, None]) | itself
        attended = self.midlayer.self_attn.attend(q, KeyValue(cache.keys, cache.values), mask[:, None])
        return self.midlayer.finish(hidden, attended)

    def _embed(self, input_ids: Tensor) -> Tensor:
        return nn.functional.embedding(input_ids, self.embed_tokens)


def _visible(attention_mask: Tensor, seq_lens: Tensor | None) -> Tensor:
    """[B, 1, S, S] bool: causal, real keys of one's own document; every position sees itself, padding too."""
    length = attention_mask.shape[1]
    seen = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    mask = seen & attention_mask.bool()[:, None]
    if seq_lens is not None:
        steps = torch.arange(length, device=seq_lens.device).expand(seq_lens.shape[0], -1).contiguous()
        docs = torch.searchsorted(seq_lens.cumsum(1), steps, right=True)
        mask = mask & (docs[:, :, None] == docs[:, None])
    return (mask | torch.eye(length, dtype=torch.bool, device=mask.device))[:, None]


def _require(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got != wanted:
        fix = "take the draft's config from this target's config and the run's vocabulary map"
        raise SchemaError(f"{name} does not fit the draft", wanted=list(wanted), got=list(got), fix=fix)
