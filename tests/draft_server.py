"""A vLLM server that decodes with an exported draft, or without one."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from eaglefeed.producer.engines.vllm_server import OwnServer
from eaglefeed.storage.control import ControlClient

__all__ = ["DraftLaunch", "DraftServer", "Served"]

VLLM_PYTHON = Path(__file__).parents[1] / ".vllm" / "bin" / "python"
_CACHE_BYTES = 2**30
_REQUEST_S = 120.0
_COUNTER = r"^vllm:spec_decode_num_{}_total(?:\{{[^}}]*\}})? (\S+)$"


@dataclass(frozen=True)
class DraftLaunch:
    """How the server is started; what `OwnServer` asks of eaglefeed's own `Launch`.

    Args:
        source: folder of the target.
        draft: folder of the export; None decodes without a draft.
        num_draft_tokens: guesses a round.
        max_length: tokens of a prompt with its answer.
    """

    source: str
    draft: Path | None
    num_draft_tokens: int
    max_length: int = 2048

    def command(self, port: int, captures: Path) -> list[str]:
        """The command line."""
        named: dict[str, Any] = {
            "model": self.source,
            "served-model-name": "target",
            "host": "127.0.0.1",
            "port": port,
            "dtype": "float32",
            "max-model-len": self.max_length,
            "kv-cache-memory-bytes": _CACHE_BYTES,
        }
        if self.draft is not None:
            guessing = {"method": "eagle3", "model": str(self.draft), "num_speculative_tokens": self.num_draft_tokens}
            named["speculative-config"] = json.dumps(guessing)
        flags = ["--enforce-eager", "--no-enable-prefix-caching", "--skip-tokenizer-init"]
        options = [part for name, value in named.items() for part in (f"--{name}", str(value))]
        env = ["env", "HF_HUB_OFFLINE=1", "VLLM_NO_USAGE_STATS=1"]
        return [*env, str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.api_server", *options, *flags]


class Served(NamedTuple):
    """What a server answered, and what it counted meanwhile.

    Args:
        answers: token ids of each prompt's answer.
        num_rounds: verifying forwards.
        num_accepted: guesses that were accepted.
    """

    answers: list[list[int]]
    num_rounds: int
    num_accepted: int

    @property
    def accept_length(self) -> float:
        """As vLLM's log computes it."""
        return 1 + self.num_accepted / self.num_rounds


class DraftServer:
    """A running server; ended by `stop`, and by the end of this process."""

    def __init__(self, launch: DraftLaunch, parent: Path) -> None:
        self._has_draft = launch.draft is not None
        self._server = OwnServer(launch, parent, start_timeout_s=600.0)  # type: ignore[arg-type]
        self._client = ControlClient(self._server.url, token=self._server.key)

    def answer(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_ids: Sequence[int]) -> Served:
        """Greedy answers, one prompt after the other."""
        before = self._counts()
        answers = [self._say(prompt, max_new_tokens, end_ids) for prompt in prompts]
        rounds, accepted = (now - then for now, then in zip(self._counts(), before, strict=True))
        return Served(answers, rounds, accepted)

    def stop(self) -> None:
        """End it."""
        self._client.close()
        self._server.stop()

    def _say(self, prompt: Sequence[int], max_new_tokens: int, end_ids: Sequence[int]) -> list[int]:
        asked = {"model": "target", "prompt": list(prompt), "max_tokens": max_new_tokens, "temperature": 0}
        asked |= {"stop_token_ids": list(end_ids), "return_token_ids": True}
        body = json.dumps(asked).encode()
        headers = {"content-type": "application/json"}
        reply = self._client.call("/v1/completions", body, method="POST", headers=headers, timeout_s=_REQUEST_S)
        (choice,) = json.loads(reply.body)["choices"]
        return choice["token_ids"]

    def _counts(self) -> tuple[int, int]:
        """Verifying forwards and accepted guesses since the start."""
        if not self._has_draft:
            return 0, 0
        text = self._client.call("/metrics", method="GET", timeout_s=_REQUEST_S).body.decode()
        found = [re.findall(_COUNTER.format(name), text, re.MULTILINE) for name in ("drafts", "accepted_tokens")]
        rounds, accepted = (sum(int(float(value)) for value in values) for values in found)
        return rounds, accepted
