"""The draft that the demo trains, served by vLLM on the CPU; and a draft with each fault that vLLM takes in silence."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from draft_server import VLLM_PYTHON, DraftLaunch, DraftServer, Served
from eaglefeed.cli.demo_evaluation import MAX_NEW_TOKENS, held_out_prompts
from eaglefeed.cli.demo_run import DemoInputs
from eaglefeed.consumer.draft import Eagle3Draft
from eaglefeed.consumer.draft_config import DraftConfig
from eaglefeed.consumer.evaluate import NUM_DRAFT_TOKENS
from eaglefeed.consumer.export import export_draft, verify_export
from eaglefeed.consumer.trainer import DraftTrainer, OptimizerSettings
from eaglefeed.errors import SchemaError, TargetUnavailable
from eaglefeed.producer.loading import load_target, load_tokenizer, resolve_target
from eaglefeed.producer.target import HFEagle3TargetModel

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

AGREEMENT = 0.05
AT_ONCE = 2
"""Servers at a time: one alone spends half a minute on a single core before it answers."""
AUX = (1, 14, 26)
NUM_KNOWN, STEPS = 6, 60
TRAPS: dict[str, Any] = {
    "rope_theta": 10_000.0,  # what servers take where nothing is written
    "eagle_aux_hidden_state_layer_ids": list(AUX),  # ours, in place of vLLM's
    "max_position_embeddings": 16,  # below every prompt's length
}


@dataclass(frozen=True)
class Demo:
    """What a run of the demo left.

    Args:
        document: what it printed.
        draft: its export.
        prompts: held-out ones, tokenized, that it decoded.
        target: folder of the target.
    """

    document: dict[str, Any]
    draft: Path
    prompts: list[list[int]]
    target: Path

    @property
    def config(self) -> dict[str, Any]:
        """The target's."""
        return json.loads((self.target / "config.json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    if not VLLM_PYTHON.exists():
        pytest.skip("vLLM is not installed: run `make test-vllm`")
    try:
        target = Path(resolve_target("SmolLM2-135M-Instruct"))
    except TargetUnavailable as error:
        pytest.skip(str(error))
    runs = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "eaglefeed", "demo", "--json", "--run-dir", str(runs)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    (draft,) = runs.glob("*/draft/export-*")
    run = draft.parents[1]
    inputs = DemoInputs(run / "train.jsonl", run / "held_out.jsonl", run / "vocab.safetensors")
    return Demo(json.loads(ended.stdout), draft, held_out_prompts(inputs, load_tokenizer()), target)


def serve(demo: Demo, drafts: Mapping[str, Path | None], num_prompts: int, folder: Path) -> dict[str, Served]:
    """The answers of a server with each of the drafts."""

    def one(draft: Path | None) -> Served:
        server = DraftServer(DraftLaunch(str(demo.target), draft, NUM_DRAFT_TOKENS), folder)
        try:
            return server.answer(demo.prompts[:num_prompts], MAX_NEW_TOKENS, [demo.config["eos_token_id"]])
        finally:
            server.stop()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(drafts, pool.map(one, drafts.values()), strict=True))
    for name, result in found.items():
        sys.stdout.write(f"vLLM, draft {name}: {result.num_accepted} accepted in {result.num_rounds} rounds\n")
    return found


@pytest.fixture(scope="module")
def served(demo: Demo, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    drafts = {"none": None, "demo": demo.draft}
    return serve(demo, drafts, len(demo.prompts), tmp_path_factory.mktemp("servers"))


def test_the_answers_with_the_draft_are_the_targets_without_it(demo: Demo, served: dict[str, Served]) -> None:
    assert len(served["demo"].answers) == len(demo.prompts) == 12
    assert served["demo"].answers == served["none"].answers
    assert max(map(len, served["none"].answers)) == MAX_NEW_TOKENS


def test_the_engine_accepts_as_much_as_we_say(demo: Demo, served: dict[str, Served]) -> None:
    ours, engines = demo.document["accept_length"], served["demo"].accept_length
    sys.stdout.write(f"acceptance length: vLLM's {engines:.4f}, ours {ours:.4f}\n")
    assert engines == pytest.approx(ours, rel=AGREEMENT)
    assert engines > 1.1


def padded(rows: list[list[int]]) -> Tensor:
    return pad_sequence([torch.tensor(row) for row in rows], batch_first=True)


def draft_that_knows(prompts: list[list[int]], answers: list[list[int]], target: Path) -> Eagle3Draft:
    """Trained on these answers until it has them nearly by heart, so that a fault has something to cost."""
    torch.set_num_threads(1)
    model = load_target(str(target), num_threads=1, dtype="float32")
    t2d = torch.zeros(model.config.vocab_size, dtype=torch.bool)
    t2d[[token for answer in answers for token in answer]] = True
    backend = HFEagle3TargetModel(model, AUX)
    backend.set_vocab_mapping(t2d.nonzero()[:, 0], t2d)
    pairs = list(zip(prompts, answers, strict=True))
    batch = backend.generate_batch(
        padded([prompt + answer for prompt, answer in pairs]),
        padded([[1] * len(prompt + answer) for prompt, answer in pairs]),
        padded([[0] * len(prompt) + [1] * len(answer) for prompt, answer in pairs]),
    )
    sizes = {"draft_vocab_size": int(t2d.sum()), "intermediate_size": 768}
    draft = Eagle3Draft(DraftConfig.from_target_config(model.config.to_dict(), **sizes))
    table, norm = model.get_input_embeddings().weight.detach(), model.model.norm.weight.detach()
    draft.initialize_from_target(embed_tokens=table, lm_head=table, t2d=t2d, norm=norm)
    # Its attention has to find by position what it looks at: keys that start like their queries look at themselves.
    nn.init.normal_(draft.midlayer.self_attn.k_proj.weight, std=0.02, generator=torch.Generator().manual_seed(1))
    trainer = DraftTrainer(draft, OptimizerSettings(lr=1e-3))
    for _ in range(STEPS):
        trainer.step([batch])
    return draft


def with_fault(draft: Path, folder: Path, name: str) -> Path:
    shutil.copytree(draft, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {name: TRAPS[name]}))
    return folder


@pytest.fixture(scope="module")
def drafts(demo: Demo, served: dict[str, Served], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("drafts")
    draft = draft_that_knows(demo.prompts[:NUM_KNOWN], served["none"].answers[:NUM_KNOWN], demo.target)
    intact = export_draft(draft, folder / "intact", target_config=demo.config, aux_layer_ids=AUX, dtype=torch.float32)
    return {"intact": intact} | {name: with_fault(intact, folder / name, name) for name in TRAPS}


@pytest.fixture(scope="module")
def faulty(demo: Demo, drafts: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    return serve(demo, drafts, NUM_KNOWN, tmp_path_factory.mktemp("servers"))


@pytest.mark.parametrize("name", TRAPS)
def test_a_fault_that_costs_acceptance_in_silence_is_seen_by_the_export(
    name: str, demo: Demo, drafts: dict[str, Path], served: dict[str, Served], faulty: dict[str, Served]
) -> None:
    assert faulty[name].answers == served["none"].answers[:NUM_KNOWN]  # silent: only slower
    assert faulty["intact"].accept_length > 2.0
    assert faulty[name].accept_length < 0.98 * faulty["intact"].accept_length
    with pytest.raises(SchemaError, match=name):
        verify_export(drafts[name], target_config=demo.config, aux_layer_ids=AUX)
