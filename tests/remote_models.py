"""RemoteEagle3TargetModel in a test: closed at the block's end."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from coded_target import V
from eaglefeed.consumer.remote import RemoteEagle3TargetModel
from eaglefeed.schema.vocab import VocabMapping

ODD = VocabMapping.from_ids(torch.arange(1, V, 2), vocab_size=V)
"""A draft vocabulary of the coded target."""


@contextmanager
def closing(*urls: str, **options: object) -> Iterator[RemoteEagle3TargetModel]:
    """A model of these servers."""
    options = {"device": "cpu", "timeout": 30.0} | options
    model = RemoteEagle3TargetModel.from_urls(urls, **options)  # type: ignore[arg-type]
    try:
        yield model
    finally:
        model.close()
