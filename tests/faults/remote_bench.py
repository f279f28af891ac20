"""A client of fake target servers, the rows it asks about, and what can go wrong with an answer."""

from contextlib import ExitStack
from functools import cached_property

import torch
from torch import Tensor

from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.errors import EaglefeedError, TargetUnavailable
from eaglefeed.schema.batch import Eagle3TargetBatch
from eaglefeed.schema.protocol import TENSOR_BODY
from eaglefeed.storage.shard import TensorWriter, encode_tensors
from faults.fake_target import FakeTarget, Fault, H, Handler, Tensors, V, answer_to, fake_target, honest

SELECTED = torch.tensor([1, 4, 9])


class Bench:
    """Two servers, and models of them that are closed before they are."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    @cached_property
    def server(self) -> FakeTarget:
        return self.stack.enter_context(fake_target())

    @cached_property
    def other(self) -> FakeTarget:
        return self.stack.enter_context(fake_target())

    def connect(self, *servers: FakeTarget, **options: object) -> RemoteEagle3TargetModel:
        options = {"device": "cpu", "timeout": 5.0, "max_retries": 1} | options
        model = RemoteEagle3TargetModel([server.url for server in servers], **options)  # type: ignore[arg-type]
        self.stack.callback(model.close)
        return model


def rows(first: int = 3) -> dict[str, Tensor]:
    """[2, 5] rows, the second of three tokens."""
    ids = torch.arange(first, first + 10).reshape(2, 5) % V
    mask = torch.ones_like(ids)
    mask[1, 3:] = 0
    return {"input_ids": ids * mask, "attention_mask": mask, "loss_mask": mask}


def check(batch: Eagle3TargetBatch, asked: dict[str, Tensor], draft_size: int = 0) -> None:
    wanted, found = answer_to(asked, draft_size), batch.tensors()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def with_map(model: RemoteEagle3TargetModel) -> RemoteEagle3TargetModel:
    mask = torch.zeros(V, dtype=torch.bool)
    mask[SELECTED] = True
    model.set_vocab_mapping(SELECTED, mask)
    return model


def changed(**changes: Tensor) -> Fault:
    return lambda handler, tensors, metadata: honest(handler, tensors | changes, metadata)


def relabelled(**changes: str) -> Fault:
    return lambda handler, tensors, metadata: honest(handler, tensors, metadata | changes)


def refused(error: EaglefeedError, status: int = 0) -> Fault:
    return lambda handler, _tensors, _metadata: handler.refuse(error, status)


def said(status: int, body: bytes, kind: str = "text/html", length: int = -1) -> Fault:
    return lambda handler, _tensors, _metadata: handler.reply(status, body, kind=kind, length=length)


def flipped(handler: Handler, tensors: Tensors, metadata: dict[str, str]) -> None:
    data = encode_tensors(TensorWriter(tensors, metadata))
    data[-1] ^= 1
    handler.reply(200, data, kind=TENSOR_BODY)


def cut_short(handler: Handler, tensors: Tensors, metadata: dict[str, str]) -> None:
    data = encode_tensors(TensorWriter(tensors, metadata))
    handler.reply(200, data[:-9], kind=TENSOR_BODY, length=len(data))
    handler.hang_up()


def lost(handler: Handler, _tensors: Tensors, _metadata: dict[str, str]) -> None:
    """The server did the work, and its reply never came."""
    handler.hang_up()


def no_http(handler: Handler, _tensors: Tensors, _metadata: dict[str, str]) -> None:
    handler.wfile.write(b"\x00\xff garbage\r\n\r\n")
    handler.hang_up()


def of_other_rows(handler: Handler, tensors: Tensors, metadata: dict[str, str]) -> None:
    honest(handler, answer_to(rows(first=4)), metadata)


def stalled(handler: Handler, tensors: Tensors, metadata: dict[str, str]) -> None:
    data = encode_tensors(TensorWriter(tensors, metadata))
    handler.reply(200, data[: len(data) // 2], kind=TENSOR_BODY, length=len(data))
    handler.wfile.flush()
    handler.server.ended.wait(20)


FAULTS: dict[str, Fault] = {
    "busy": refused(TargetUnavailable("too many requests wait", subject="x")),
    "a gateway's 503": said(503, b"<html>try later</html>"),
    "a gateway's 502": said(502, b""),
    "no HTTP": no_http,
    "a web page": said(200, b"<html>hello</html>"),
    "an empty body": said(200, b"", TENSOR_BODY),
    "no tensors": said(200, b"x" * 5000, TENSOR_BODY),
    "ten gigabytes": said(200, b"", TENSOR_BODY, length=10**10),
    "cut short": cut_short,
    "lost": lost,
    "damaged": flipped,
    "another request's id": relabelled(request="0" * 32),
    "another model's id": relabelled(model="0" * 16),
    "another request's rows": of_other_rows,
    "wider states": changed(aux_hidden_states=torch.zeros(2, 5, 3 * H + 3)),
    "longer rows": changed(aux_hidden_states=torch.zeros(2, 6, 3 * H)),
    "other dtypes": changed(aux_hidden_states=torch.zeros(2, 5, 3 * H, dtype=torch.float16)),
    "both encodings": changed(target_probs=torch.zeros(2, 5, 3), position_mask=torch.zeros(2, 5, 1).bool()),
}
