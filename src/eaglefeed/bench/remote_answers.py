"""Answers of a target whose forward costs nothing but the sleep it is told: their tensors are made before.

S sequence · H target hidden size · V target vocabulary · D draft vocabulary, all of V here; B is 1
"""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, NoReturn

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eaglefeed.bench.remote_plan import RemotePlan
from eaglefeed.bench.storage_plan import StoragePlan
from eaglefeed.bench.storage_samples import Encoding, make_sample
from eaglefeed.clock import SYSTEM_CLOCK
from eaglefeed.producer.engine import Captured, Eagle3Target, Selected
from eaglefeed.producer.parts import TargetParts
from eaglefeed.producer.rows import Rows
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.head import LogitRule
from eaglefeed.schema.values import shift_left

__all__ = [
    "SLEEPING_TOKENS",
    "SMALL_TOKENS",
    "WARM_UP_TOKENS",
    "Answer",
    "PreparedTarget",
    "Tensors",
    "read_answers",
    "write_answers",
]

WARM_UP_TOKENS, SMALL_TOKENS, SLEEPING_TOKENS = 8, 16, 32
_SMALL = 64
Tensors = dict[str, Tensor]


class Answer(NamedTuple):
    """The file of an answer's tensors, and their bytes."""

    path: Path
    num_bytes: int


def write_answers(folder: Path, plan: RemotePlan) -> dict[int, Answer]:
    """Write the large answer, the two that slow clients get, and two small ones; returns them by their tokens."""
    sizes = dict.fromkeys((plan.tokens, plan.memory_tokens, WARM_UP_TOKENS), (plan.hidden, plan.draft_vocab))
    sizes |= dict.fromkeys((SMALL_TOKENS, SLEEPING_TOKENS), (_SMALL, _SMALL))
    return {tokens: _write(folder, tokens, *size) for tokens, size in sizes.items()}


def _write(folder: Path, tokens: int, hidden: int, draft_vocab: int) -> Answer:
    sample = make_sample(StoragePlan(tokens=tokens, hidden=hidden, draft_vocab=draft_vocab), Encoding.TARGET_PROBS)
    tensors = dict(sample.features)
    tensors["target_probs"] = tensors["target_probs"].float()
    for name in ("input_ids", "loss_mask"):
        tensors[name] = shift_left(tensors[name])
    path = folder / f"{tokens}.safetensors"
    save_file(tensors, path)
    return Answer(path, sum(tensor.nbytes for tensor in tensors.values()))


def read_answers(paths: Mapping[str, str], device: str = "cpu") -> dict[int, Tensors]:
    """Answers in memory, not mapped, by their tokens."""
    return {
        int(tokens): {name: tensor.to(device, copy=True) for name, tensor in load_file(path).items()}
        for tokens, path in paths.items()
    }


class PreparedTarget(Eagle3Target):
    """Answers a row of S tokens with the answer of S tokens, whatever the tokens are.

    Args:
        answers: by their tokens, all of one H and D.
        sleep_s: how long the forward for rows of SLEEPING_TOKENS takes.
        are_copied: each answer has memory of its own, as a target's have; else all share what was prepared.
    """

    engine = "prepared"

    def __init__(self, answers: Mapping[int, Tensors], *, sleep_s: float, are_copied: bool) -> None:
        super().__init__(_parts(next(iter(answers.values()))), (1, 2, 3), compact=False)
        self._answers, self._sleep_s, self._are_copied = answers, sleep_s, are_copied

    def fingerprint(self) -> str:
        """See Eagle3Target."""
        return "prepared"

    def capture(self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, *_packing: object) -> Captured:
        """See Eagle3Target; what the rows hold is not looked at."""
        if input_ids.shape[1] == SLEEPING_TOKENS:
            SYSTEM_CLOCK.sleep(self._sleep_s)
        return Captured(Rows(input_ids, attention_mask, loss_mask), attention_mask, attention_mask, {})

    def supervise(
        self,
        captured: Captured,
        selected: Selected | None,  # noqa: ARG002 - D is the answers'
        *,
        compact: bool = False,  # noqa: ARG002 - it serves, and a server's answers are not
    ) -> Eagle3TargetBatch:
        """See Eagle3Target; rows of another length, as the server's warm-up has, get the first answer."""
        answer = self._answers.get(captured.rows.input_ids.shape[1], next(iter(self._answers.values())))
        copied = {name: tensor.clone() for name, tensor in answer.items()} if self._are_copied else answer
        return Eagle3TargetBatch(**copied)  # type: ignore[arg-type]

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> NoReturn:
        raise NotImplementedError


def _parts(answer: Tensors) -> TargetParts:
    """The sizes of an answer's target; its weights are one number that is looked at V x H times."""
    aux, vocab = answer["aux_hidden_states"], answer["target_probs"].shape[-1]
    hidden = aux.shape[-1] // 3
    embed_tokens, head = nn.Embedding(1, 1), nn.Linear(1, 1, bias=False)
    for module in (embed_tokens, head):
        module.weight = nn.Parameter(aux.new_zeros(1).expand(vocab, hidden), requires_grad=False)
    config = SimpleNamespace(num_hidden_layers=4, hidden_size=hidden, max_position_embeddings=None)
    return TargetParts(config, embed_tokens, head, None, LogitRule())
