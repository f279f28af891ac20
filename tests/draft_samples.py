"""Tiny drafts and batches for the tests of the consumer's training half."""

import torch
from torch import Tensor

from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.schema.batch import Eagle3TargetBatch

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other

V, D, H = 23, 11, 16
T2D = torch.zeros(V, dtype=torch.bool).index_fill(0, torch.tensor([0, 2, 3, 5, 7, 8, 11, 13, 17, 19, 22]), True)
CONFIG = DraftConfig(
    hidden_size=H,
    intermediate_size=24,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-5,
    rope_theta=100.0,
    max_position_embeddings=64,
    vocab_size=V,
    draft_vocab_size=D,
    ttt_steps=3,
)


def make_draft(config: DraftConfig = CONFIG, seed: int = 0) -> Eagle3Draft:
    draw = torch.Generator().manual_seed(seed + 1)
    draft = Eagle3Draft(config, seed=seed)
    draft.initialize_from_target(
        embed_tokens=torch.randn(V, H, generator=draw),
        lm_head=torch.randn(V, H, generator=draw) / 4,
        norm=torch.rand(H, generator=draw) + 0.5,
        t2d=T2D if config.draft_vocab_size == D else torch.ones(V, dtype=torch.bool),
    )
    return draft


def shift(tensor: Tensor) -> Tensor:
    """Left by one along the sequence, zero tail."""
    return torch.cat([tensor[:, 1:], torch.zeros_like(tensor[:, :1])], dim=1)


def make_batch(
    batch_size: int = 2, length: int = 9, *, seed: int = 0, encoding: str = "target_probs", sample_id: str = "s"
) -> Eagle3TargetBatch:
    draw = torch.Generator().manual_seed(seed)
    logits = shift(torch.randn(batch_size, length, V, generator=draw) * 2)
    loss_mask = shift((torch.arange(length) >= 2).long().expand(batch_size, -1))
    core = {
        "aux_hidden_states": torch.randn(batch_size, length, 3 * H, generator=draw),
        "input_ids": shift(torch.randint(0, V, (batch_size, length), generator=draw)),
        "attention_mask": torch.ones(batch_size, length, dtype=torch.long),
        "loss_mask": loss_mask,
    }
    probs = logits[..., T2D].softmax(-1)
    mask = (T2D[logits.argmax(-1)] & loss_mask.bool())[..., None]
    supervision = {"logits": logits} if encoding == "logits" else {"target_probs": probs, "position_mask": mask}
    ids = tuple(f"{sample_id}-{row}" for row in range(batch_size))
    return Eagle3TargetBatch(**core, **supervision, sample_ids=ids)
