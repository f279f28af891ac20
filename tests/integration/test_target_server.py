"""A target server over loopback: whose answer is whose, sessions, and what else it says."""

import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from coded_target import POSITIONS, CodedTarget, H, V, check_answer, row
from eaglefeed.errors import SampleCorrupt, SchemaError, StorageError, TargetUnavailable
from eaglefeed.producer.server import TargetServer
from eaglefeed.producer.target import HFEagle3TargetModel
from eaglefeed.schema.protocol import (
    GENERATE,
    HEALTH,
    HEARTBEAT,
    INPUT_EMBEDDINGS,
    MODEL_INFO,
    PAIR_BODY,
    READY,
    REQUEST_HEADER,
    SESSION_HEADER,
    SET_VOCAB_MAPPING,
    TARGET_ASSETS,
    TIMEOUT_HEADER,
    ModelInfo,
)
from eaglefeed.schema.vocab import VocabMapping
from eaglefeed.storage.control import Refused
from eaglefeed.storage.exchange import TensorExchange
from eaglefeed.storage.pair_pool import PairPool
from eaglefeed.storage.shard import TensorWriter, encode_tensors
from faults.processes import wait_until
from target_servers import MAX_BYTES, Asker, rows_body, serving
from tiny_target import tiny_model

CLIENTS = 64
ODD, PRIMES = torch.arange(1, V, 2), torch.tensor([2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61])


@pytest.fixture
def target() -> CodedTarget:
    torch.set_num_threads(1)
    return CodedTarget()


@pytest.fixture
def server(target: CodedTarget) -> Iterator[TargetServer]:
    with serving(target) as started:
        target.forwards.clear()
        yield started


@pytest.fixture
def asker(server: TargetServer) -> Iterator[Asker]:
    with Asker(server.url) as client:
        yield client


def random_rows(generator: random.Random) -> tuple[Tensor, Tensor, Tensor]:
    shape = generator.randint(1, 3), generator.randint(1, 40)
    ids = torch.tensor([[generator.randrange(V) for _ in range(shape[1])] for _ in range(shape[0])])
    return ids, torch.ones_like(ids), torch.ones_like(ids)


def test_64_clients_at_once_each_get_their_own_answers_from_fewer_forwards(target: CodedTarget):
    with serving(target, max_in_flight=CLIENTS) as server:
        target.forwards.clear()
        target.gate.clear()

        def run(seed: int) -> int:
            generator, mapping = random.Random(seed), {0: None, 1: ODD, 2: PRIMES}[seed % 3]
            with Asker(server.url) as client:
                session = "" if mapping is None else client.begin(VocabMapping.from_ids(mapping, vocab_size=V))
                for _ in range(4):
                    rows = random_rows(generator)
                    check_answer(client.ask(rows, session=session).tensors, rows[0], mapping)
            return 4

        with ThreadPoolExecutor(CLIENTS) as pool, Asker(server.url) as watcher:
            counts = pool.map(run, range(CLIENTS))
            wait_until(lambda: watcher.metric("waiting") + watcher.metric("in_flight") == CLIENTS)
            target.gate.set()
            answered = sum(counts)
        assert answered == 4 * CLIENTS
        assert len(target.forwards) < answered
        assert sum(len(ids) for ids in target.forwards) >= answered


def test_an_exact_answer_is_bit_for_bit_that_of_the_model_in_the_clients_process():
    torch.set_num_threads(1)
    model = HFEagle3TargetModel(tiny_model())
    mapping = VocabMapping.from_ids(torch.arange(0, 259, 3), vocab_size=259)
    model.set_vocab_mapping(mapping.selected_token_ids, mapping.selected_token_mask)
    generator = torch.Generator().manual_seed(0)
    asked = [exact_rows(generator, index) for index in range(24)]
    wanted = [model.generate_batch(*rows).tensors() for rows in asked]
    forwards: list[Tensor] = []
    capture = model.capture
    model.capture = lambda *rows: (forwards.append(rows[0]), capture(*rows))[1]
    with serving(model, max_in_flight=8) as server, ThreadPoolExecutor(12) as pool, Asker(server.url) as client:
        session = client.begin(mapping)
        forwards.clear()
        answers = list(pool.map(lambda rows: client.ask(rows, session=session, exact=True).tensors, asked))
    assert len(forwards) == len(asked)
    for got, want in zip(answers, wanted, strict=True):
        assert list(got) != []
        assert {name: tensor.dtype for name, tensor in got.items()} == {n: t.dtype for n, t in want.items()}
        assert all(torch.equal(got[name], want[name]) for name in want)


def exact_rows(generator: torch.Generator, index: int) -> tuple[Tensor, Tensor, Tensor]:
    """Two rows of unlike length, padded on the right or, every third, on the left."""
    length, shorter = 5 + index, 2 + index // 2
    ids = torch.randint(0, 259, (2, length), generator=generator)
    real = torch.ones_like(ids)
    real[1] = (torch.arange(length) >= length - shorter) if index % 3 == 0 else (torch.arange(length) < shorter)
    return ids * real, real, torch.randint(0, 2, (2, length), generator=generator) * real


def test_two_sessions_share_a_server_and_ending_one_leaves_the_other(asker: Asker):
    ids = row(3, 4, 5, 6)
    odd = asker.begin(VocabMapping.from_ids(ODD, vocab_size=V))
    primes = asker.begin(VocabMapping.from_ids(PRIMES, vocab_size=V))
    check_answer(asker.ask(ids, session=odd).tensors, ids[0], ODD)
    check_answer(asker.ask(ids, session=primes).tensors, ids[0], PRIMES)
    check_answer(asker.ask(ids).tensors, ids[0])
    assert asker.metric("sessions") == 2
    asker.end(odd)
    with pytest.raises(Refused) as refused:
        asker.ask(ids, session=odd)
    assert refused.value.status == 409
    assert isinstance(refused.value.error, StorageError)
    check_answer(asker.ask(ids, session=primes).tensors, ids[0], PRIMES)


def test_a_heartbeat_of_an_unknown_session_is_told_so(asker: Asker):
    session = asker.begin(VocabMapping.from_ids(ODD, vocab_size=V))
    assert asker.call(HEARTBEAT, headers={SESSION_HEADER: session}, timeout_s=10).status == 204
    with pytest.raises(Refused) as refused:
        asker.call(HEARTBEAT, headers={SESSION_HEADER: "ab" * 16}, timeout_s=10)
    assert refused.value.status == 409


def test_it_is_alive_at_once_ready_after_its_warm_up_and_answers_what_came_before(target: CodedTarget):
    target.gate.clear()
    with serving(target, ready=False) as server, ThreadPoolExecutor(2) as pool, Asker(server.url) as client:
        assert target.entered.acquire(timeout=10)
        assert client.call(HEALTH, method="GET", timeout_s=10).status == 200
        with pytest.raises(Refused) as refused:
            client.call(READY, method="GET", timeout_s=10)
        assert (refused.value.status, type(refused.value.error)) == (503, TargetUnavailable)
        early = pool.submit(client.ask, row(7, 8))
        assert not server.wait_ready(0.0)
        target.gate.set()
        check_answer(early.result(30).tensors, torch.tensor([[7, 8]]))
        assert client.call(READY, method="GET", timeout_s=10).status == 200


def test_everything_but_answers_is_answered_during_a_long_forward(target: CodedTarget, asker: Asker):
    target.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(asker.ask, row(7, 8))
        assert target.entered.acquire(timeout=10)
        assert target.entered.acquire(timeout=10)  # the warm-up's, and this one's
        assert asker.call(HEALTH, method="GET", timeout_s=10).status == 200
        assert asker.metric("in_flight") == 1
        assert asker.call(MODEL_INFO, timeout_s=10).status == 200
        target.gate.set()
        check_answer(late.result(30).tensors, torch.tensor([[7, 8]]))


def test_metrics_count_forwards_answers_and_failures(target: CodedTarget, asker: Asker):
    target.poison = {13}
    for _ in range(3):
        asker.ask(row(1, 2, 3))
    with pytest.raises(Refused):
        asker.ask(row(13, 1))
    names = ("ready", "answered_total", "failed_total", "forwards_total", "tokens_total", "waiting")
    assert [asker.metric(name) for name in names] == [1, 3, 1, 4, 9, 0]


def test_what_it_says_of_its_target_and_its_weights_are_the_targets(target: CodedTarget, asker: Asker):
    info = ModelInfo.from_json(asker.call(MODEL_INFO, timeout_s=10).body, asker.url)
    assert (info.target, info.target_fingerprint, info.engine, info.dtype) == ("test", "c0de", "coded", "float32")
    sizes = (info.hidden_size, info.vocab_size, info.num_hidden_layers, info.max_positions)
    assert sizes == (H, V, 7, POSITIONS)
    assert info.aux_layer_ids == target.aux_layer_ids
    fetch: Any = lambda path: asker.fetch(path, timeout_s=10, subject=path, max_bytes=MAX_BYTES)  # noqa: E731
    embeddings = fetch(INPUT_EMBEDDINGS)
    assert torch.equal(embeddings.tensors["weight"], target.parts.embed_tokens.weight)
    assert embeddings.metadata["model"] == info.id
    tensors, metadata = target.target_assets()
    assets = fetch(TARGET_ASSETS)
    assert all(torch.equal(assets.tensors[name], tensor) for name, tensor in tensors.items())
    assert metadata.items() <= assets.metadata.items()


def test_no_more_answers_are_in_memory_than_may_be_in_flight(target: CodedTarget):
    alive: list[weakref.ref[Tensor]] = []
    most: list[int] = []
    forward = target._forward

    def counted(*args: Any) -> tuple[Tensor, Tensor]:
        aux, last = forward(*args)
        alive[:] = [ref for ref in alive if ref() is not None]
        alive.append(weakref.ref(aux))
        most.append(len(alive))
        return aux, last

    target._forward = counted
    options = {"max_in_flight": 2, "batch_tokens": 1}
    with serving(target, **options) as server, ThreadPoolExecutor(12) as pool, Asker(server.url) as client:
        ids = torch.randint(0, V, (8, POSITIONS))
        rows = ids, torch.ones_like(ids), torch.ones_like(ids)
        list(pool.map(lambda _: client.ask(rows).tensors.clear(), range(60)))
    assert len(most) == 61
    assert max(most) <= 2


def tensors_body(**tensors: Tensor) -> bytearray:
    return encode_tensors(TensorWriter(tensors, {}))


IDS = torch.tensor([[1, 2, 3]])
ONES = torch.ones_like(IDS)
LONG = torch.ones(1, POSITIONS + 1, dtype=torch.int64)
GOOD = rows_body((IDS, ONES, ONES))
FLIPPED = bytearray(GOOD)
FLIPPED[-1] ^= 1
BAD_ROWS: dict[str, tuple[bytes | bytearray, str]] = {
    "nothing": (b"", "cut short before its header"),
    "garbage": (b"GET me a tensor, please", "impossible header length"),
    "cut short": (GOOD[:-1], "cut short"),
    "a flipped bit": (FLIPPED, "checksum of loss_mask differs"),
    "no digests": (
        b"\x40" + bytes(7) + b'{"input_ids":{"dtype":"I64","shape":[0],"data_offsets":[0,0]}}'.ljust(64),
        "no digests",
    ),
    "a missing tensor": (tensors_body(input_ids=IDS, loss_mask=ONES), "other tensors"),
    "another tensor": (
        tensors_body(input_ids=IDS, attention_mask=ONES, loss_mask=ONES, position_ids=ONES),
        "other tensors",
    ),
    "another dtype": (rows_body((IDS.float(), ONES, ONES)), "float32"),
    "unlike shapes": (rows_body((IDS, ONES[:, :2], ONES)), "one shape"),
    "one axis": (rows_body((IDS[0], ONES[0], ONES[0])), "one shape"),
    "no rows": (rows_body((IDS[:0], ONES[:0], ONES[:0])), "one shape"),
    "no tokens": (rows_body((IDS[:, :0], ONES[:, :0], ONES[:, :0])), "one shape"),
    "an id beyond the vocabulary": (rows_body((IDS + V, ONES, ONES)), "outside the target's vocabulary"),
    "a negative id": (rows_body((-IDS, ONES, ONES)), "outside the target's vocabulary"),
    "a mask of twos": (rows_body((IDS, ONES, ONES * 2)), "loss_mask is no mask"),
    "an empty row": (rows_body((IDS, ONES * 0, ONES)), "row without tokens"),
    "a row with a gap": (rows_body((IDS, torch.tensor([[1, 0, 1]]), ONES)), "padding between"),
    "too long a row": (rows_body((LONG, LONG, LONG)), "longer than the target's positions"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_are_none_are_refused_by_name_and_harm_nobody(asker: Asker, name: str):
    body, text = BAD_ROWS[name]
    with pytest.raises(Refused) as refused:
        asker.call(GENERATE, body, timeout_s=10)
    assert refused.value.status == 422
    assert isinstance(refused.value.error, SchemaError | SampleCorrupt)
    assert text in str(refused.value.error)
    check_answer(asker.ask(row(1, 2)).tensors, torch.tensor([[1, 2]]))


def test_more_tokens_than_a_request_may_have_are_refused_before_their_forward(target: CodedTarget):
    with serving(target, max_tokens=8) as server, Asker(server.url) as asker:
        check_answer(asker.ask(row(*range(8))).tensors, torch.arange(8)[None])
        with pytest.raises(Refused) as refused:
            asker.ask(row(*range(9)))
        assert "serve.max_tokens" in str(refused.value.error)
        assert [1, 9] not in [list(ids.shape) for ids in target.forwards]


IDS_5, MASK_5 = torch.arange(5), torch.arange(V) < 5
BAD_MAPS: dict[str, tuple[bytes | bytearray, str]] = {
    "garbage": (b"not a map", "impossible header length"),
    "rows": (GOOD, "other tensors"),
    "an id too many": (
        tensors_body(selected_token_ids=torch.arange(6), selected_token_mask=MASK_5),
        "inconsistent",
    ),
    "another vocabulary": (
        tensors_body(selected_token_ids=IDS_5, selected_token_mask=MASK_5[:10]),
        "another target's",
    ),
    "a mask of numbers": (tensors_body(selected_token_ids=IDS_5, selected_token_mask=MASK_5.long()), "other tensors"),
    "two axes": (tensors_body(selected_token_ids=IDS_5[None], selected_token_mask=MASK_5), "not a vocabulary map"),
    "nothing": (tensors_body(selected_token_ids=IDS_5[:0], selected_token_mask=MASK_5 & False), "not a vocabulary"),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_vocabulary_map_that_is_none_is_refused_by_name(asker: Asker, name: str):
    body, text = BAD_MAPS[name]
    with pytest.raises(Refused) as refused:
        asker.call(SET_VOCAB_MAPPING, body, headers={SESSION_HEADER: "ab" * 16}, timeout_s=10)
    assert refused.value.status == 422
    assert text in str(refused.value.error)
    assert asker.metric("sessions") == 0


@pytest.mark.parametrize(
    ("path", "header", "value"),
    [
        (GENERATE, REQUEST_HEADER, "x" * 32),
        (GENERATE, SESSION_HEADER, "AB" * 16),
        (GENERATE, TIMEOUT_HEADER, "soon"),
        (GENERATE, TIMEOUT_HEADER, "nan"),
        (GENERATE, TIMEOUT_HEADER, "-1"),
        (HEARTBEAT, SESSION_HEADER, ""),
        (SET_VOCAB_MAPPING, SESSION_HEADER, "ab"),
    ],
)
def test_a_header_that_is_none_is_refused_by_name(asker: Asker, path: str, header: str, value: str):
    with pytest.raises(Refused) as refused:
        asker.call(path, GOOD, headers={header: value}, timeout_s=10)
    assert refused.value.status == 422
    assert header in str(refused.value.error)


def test_many_threads_may_ask_while_sessions_come_and_go(asker: Asker):
    stop = threading.Event()

    def come_and_go() -> int:
        count = 0
        while not stop.is_set():
            asker.end(asker.begin(VocabMapping.from_ids(ODD, vocab_size=V)))
            count += 1
        return count

    with ThreadPoolExecutor(9) as pool:
        coming = pool.submit(come_and_go)
        primes = asker.begin(VocabMapping.from_ids(PRIMES, vocab_size=V))
        ids = row(2, 3, 4)
        for fetched in pool.map(lambda _: asker.ask(ids, session=primes), range(60)):
            check_answer(fetched.tensors, ids[0], PRIMES)
        stop.set()
        assert coming.result(30) > 0
    assert asker.metric("sessions") == 1


def test_answers_over_a_pair_group_are_those_of_the_body(target: CodedTarget, server: TargetServer, asker: Asker):
    pool = PairPool(asker, backend="gloo", device=torch.device("cpu"), max_pairs=2, timeout_s=20)
    exchange = TensorExchange(asker, pool, None)
    rows = random_rows(random.Random(7))
    session = asker.begin(VocabMapping.from_ids(PRIMES, vocab_size=V))
    headers = {REQUEST_HEADER: "ab" * 16, SESSION_HEADER: session}
    for _ in range(3):
        fetched = exchange.fetch(
            GENERATE, rows_body(rows), headers=headers, timeout_s=20, subject="test", max_bytes=MAX_BYTES
        )
        assert fetched.headers["content-type"] == PAIR_BODY
        assert fetched.metadata["request"] == "ab" * 16
        check_answer(fetched.tensors, rows[0], PRIMES)
    wait_until(lambda: asker.metric("in_flight") == 0)
    pool.close()
    check_answer(asker.ask(rows, session=session).tensors, rows[0], PRIMES)
