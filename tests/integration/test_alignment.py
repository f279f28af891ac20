"""One row, counted by hand, is the same at the trainer whichever way it came: shifted once, with the table's dtypes.

Raw tokens 10 to 14, of which 12 and 13 are the target's own; the target's logits at a position are all for the next raw
token. So row t of a sample speaks of raw token t + 1: its best token is raw token t + 2, and rows 1 and 2, the
positions of 11 and 12 shifted, are scored against 13 and 14.
"""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import peers
import pipeline
from coded_target import HIGH, CodedTarget, H, V, aux_of
from eaglefeed.consumer.expand import TargetHead
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.consumer.stream import SampleStream
from eaglefeed.producer.agreement import RunAgreement
from eaglefeed.producer.making import SampleMaker
from eaglefeed.producer.rows import Rows
from eaglefeed.queue.base import QueueItem
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.contract import RunContract
from eaglefeed.schema.eagle3 import EAGLE3_FEATURES
from eaglefeed.schema.eagle3_compact import EAGLE3_COMPACT_FEATURES
from eaglefeed.schema.padding import pad_prompt
from eaglefeed.schema.prompt import Prompt, PromptRow, encode_prompt
from eaglefeed.schema.refs import encode_ref
from eaglefeed.storage.base import FeatureStore, open_store
from remote_models import closing
from target_servers import serving

torch.set_num_threads(1)
DRAFT_IDS = torch.tensor([0, 12, 13, 20])
T2D = torch.isin(torch.arange(V), DRAFT_IDS)
SUPERVISION = ("logits", "target_probs", "last_hidden_states")
STORES = ("file", "peer over HTTP", "peer over a pair")
WAYS = [(way, supervision) for way in ("colocated", *STORES) for supervision in SUPERVISION]
WAYS += [(f"server over {plane}", supervision) for plane in ("HTTP", "a pair") for supervision in SUPERVISION[:2]]


class Foreseeing(CodedTarget):
    """Its logits at position t are HIGH at the row's next token, and at 0 where there is none."""

    def _forward(self, rows: Rows, position_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        aux, _ = super()._forward(rows, position_ids)
        following = torch.cat([rows.input_ids[:, 1:], torch.zeros_like(rows.input_ids[:, :1])], dim=1)
        return aux, nn.functional.one_hot(following, H).float()


def target_of(supervision: str) -> Foreseeing:
    target = Foreseeing()
    target._compact = supervision == "last_hidden_states"
    if supervision == "target_probs":
        target.set_vocab_mapping(DRAFT_IDS, T2D)
    return target


def contract_of(target: CodedTarget, supervision: str) -> RunContract:
    compact = {"head_digest": target.head_digest(), "schema_version": 2} if target._compact else {}
    sizes = {"hidden_size": H, "vocab_size": V, "max_length": 16}
    return pipeline.contract(supervision=supervision, **(sizes | compact))


def prompt(sample_id: str, ids: tuple[int, ...], loss: tuple[int, ...]) -> Prompt:
    return pipeline.prompt(0, sample_id=sample_id, rows=(PromptRow(ids, loss),))


PROMPTS = (
    prompt("five", (10, 11, 12, 13, 14), (0, 0, 1, 1, 0)),
    prompt("one", (7,), (1,)),
    prompt("two", (7, 12), (1, 1)),
    prompt("ends", (7, 8, 12), (1, 0, 1)),
)
Batches = dict[str, Eagle3TargetBatch]


def through(writer: FeatureStore, reader: FeatureStore, supervision: str) -> Batches:
    """The prompts' samples, made, stored, read and checked as in a run."""
    run, target = pipeline.Run(clock=pipeline.TurnableClock(), store=writer), target_of(supervision)
    contract, assets = contract_of(target, supervision), target.target_assets
    agreement = RunAgreement(pipeline.MemoryStore(), run.samples, contract, assets, run_id="run", name="w")
    maker = SampleMaker(target, agreement, run_id="run", store_uri=writer.uri)
    for given in PROMPTS:
        made = maker.make(encode_prompt(given), 1)
        ref = writer.put(made.ref, made.tensors)
        run.samples.put([QueueItem(ref.sample_id, encode_ref(ref), ref.stored_bytes)])
    run.samples.close()
    head = TargetHead(*assets(), T2D) if target._compact else None
    with SampleStream(run.samples, reader, consumer="t", contract=contract, head=head, clock=run.clock) as stream:
        return {batch.sample_ids[0]: batch for batch in stream.take(len(PROMPTS))}


def colocated(supervision: str) -> Batches:
    target = target_of(supervision)
    found = {given.sample_id: target.generate_batch(**pad_prompt(given)) for given in PROMPTS}
    if supervision != "last_hidden_states":
        return found
    head = TargetHead(*target.target_assets(), T2D)
    return {name: Eagle3TargetBatch(**head.expand(batch.tensors())) for name, batch in found.items()}


def asked(model: RemoteEagle3TargetModel, supervision: str) -> Batches:
    if supervision == "target_probs":
        model.set_vocab_mapping(DRAFT_IDS, T2D)
    return {given.sample_id: model.generate_batch(**pad_prompt(given)) for given in PROMPTS}


@pytest.fixture(scope="module", params=WAYS, ids=" ".join)
def came(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Batches]:
    """A supervision, and the batches that a trainer gets of the prompts."""
    (kind, _, plane), supervision = request.param[0].partition(" over "), request.param[1]
    options: Any = {"data_plane": "http" if plane == "HTTP" else "gloo"}
    with ExitStack() as stack:
        if kind == "colocated":
            return supervision, colocated(supervision)
        if kind == "server":
            server = stack.enter_context(serving(Foreseeing()))
            return supervision, asked(stack.enter_context(closing(server.url, **options)), supervision)
        if kind == "peer":
            writer, reader = (
                stack.enter_context(peers.keeping(**options)),
                stack.enter_context(peers.pulling(**options)),
            )
            return supervision, through(writer, reader, supervision)
        store = open_store(tmp_path_factory.mktemp("store").as_uri())
        return supervision, through(store, store, supervision)


def test_ids_loss_and_supervision_are_shifted_once_and_states_are_not(came: tuple[str, Batches]) -> None:
    supervision, inputs = came[0], came[1]["five"].to_trainer_inputs()
    assert inputs["input_ids"].tolist() == [[11, 12, 13, 14, 0]]
    assert inputs["loss_mask"].tolist() == [[0, 1, 1, 0, 0]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 1, 1]]
    assert torch.equal(inputs["aux_hidden_states"], aux_of(torch.tensor([[10, 11, 12, 13, 14]])))
    if supervision == "logits":
        best = torch.tensor([12, 13, 14, 0])
        assert torch.equal(inputs["target_logits"][0, :4], nn.functional.one_hot(best, V).float() * HIGH)
        assert not inputs["target_logits"][0, 4].any()
        return
    # Of the two rows with loss, one's best token, 13, is in the draft vocabulary; the other's, 14, is not.
    assert inputs["position_mask"].tolist() == [[[False], [True], [False], [False], [False]]]
    certain, rest = (torch.tensor(x).exp() / (torch.tensor(HIGH).exp() + 3) for x in (HIGH, 0.0))
    torch.testing.assert_close(inputs["target_probs"][0, 1], torch.stack([rest, rest, certain, rest]))
    torch.testing.assert_close(inputs["target_probs"][0, 2], torch.full((4,), 0.25))


def test_every_way_brings_the_dtypes_of_the_table(came: tuple[str, Batches]) -> None:
    dtypes = {name: str(tensor.dtype) for name, tensor in came[1]["five"].tensors().items()}
    wanted = {"aux_hidden_states": "torch.float32"}
    wanted |= dict.fromkeys(["input_ids", "attention_mask", "loss_mask"], "torch.int64")
    both = {"target_probs": "torch.float32", "position_mask": "torch.bool"}
    assert dtypes == wanted | ({"logits": "torch.float32"} if came[0] == "logits" else both)


@pytest.mark.parametrize(
    ("name", "ids", "loss"),
    [
        ("one", [0], [0]),
        ("two", [12, 0], [1, 0]),  # nothing predicts a row's first token, whatever its mask says
        ("ends", [8, 12, 0], [0, 1, 0]),
    ],
)
def test_rows_of_one_and_two_tokens_and_loss_at_both_ends_are_samples(
    came: tuple[str, Batches], name: str, ids: list[int], loss: list[int]
) -> None:
    batch = came[1][name]
    assert (batch.input_ids.tolist(), batch.loss_mask.tolist()) == ([ids], [loss])
    assert batch.attention_mask.tolist() == [[1] * len(ids)]


def test_the_table_says_which_features_are_shifted() -> None:
    tables = EAGLE3_FEATURES | EAGLE3_COMPACT_FEATURES
    not_shifted = {"aux_hidden_states", "attention_mask", "position_ids", "seq_lens", "doc_remaining"}
    assert {name for name, feature in tables.items() if not feature.shifted} == not_shifted
