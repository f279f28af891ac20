"""Chats to tokens: the target's own template over the whole conversation, and a loss mask on what the target writes.

For every assistant turn the template is asked what it renders before and after it. The text in between is the turn: its
header lies before, its end-of-turn marker inside, white space behind the marker outside. It gets loss only if the text
holds it as the target wrote it, behind the prompt that the target saw.
"""

from typing import TYPE_CHECKING, NamedTuple

from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.encoding import encode_start
from eaglefeed.producer.rendering import unrendered_roles
from eaglefeed.producer.turns import AssistantTurns, Span

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

__all__ = ["TokenizedChat", "tokenize_chat"]


class TokenizedChat(NamedTuple):
    """A chat as tokens.

    Args:
        input_ids: token ids as apply_chat_template gives them, or with the last answer as it was written.
        loss_mask: 1 where the loss is taken.
        unsupervised_turns: assistant turns left without loss.
        unrendered: the role of each other turn that the template leaves out.
    """

    input_ids: list[int]
    loss_mask: list[int]
    unsupervised_turns: int
    unrendered: tuple[str, ...] = ()


def tokenize_chat(tokenizer: "PreTrainedTokenizerBase", chat: Chat, *, max_length: int | None = None) -> TokenizedChat:
    """Tokenize a chat once, as a whole, and mark the assistant's tokens.

    Special-token text inside content becomes special ids, as it does on a server. An earlier turn that the whole text
    does not hold as it was when the target wrote it (thinking that is taken out later) gets no loss. A last one that
    the template would rewrite is put behind its prompt as it was written. Of a template with generation tags, only
    what they mark is trained on.

    Args:
        tokenizer: the target's own.
        chat: the conversation.
        max_length: how many tokens matter: turns behind them are not looked for, which takes a rendering each, and of
            a text far longer than these no more tokens may come.

    Raises:
        RowFault: the template refuses the chat, drops its tool calls, or rewrites its last turn.
    """
    turns = AssistantTurns(tokenizer, chat)
    text, last = turns.last()
    encoded = encode_start(tokenizer, text, None if turns.is_tagged else max_length)
    starts = _starts(encoded)
    limit = len(text) if max_length is None or max_length >= len(starts) else starts[max_length]
    spans = [*turns.earlier(text, limit), last]
    found = [span for span in spans if span is not None]
    mask = _mask(starts, found)
    if turns.is_tagged:
        mask = [one & other for one, other in zip(mask, _tagged(tokenizer, chat), strict=True)]
    unrendered = unrendered_roles(tokenizer, chat, text)
    if "user" in unrendered:
        raise RowFault("the template leaves out what a user says")
    return TokenizedChat(encoded["input_ids"], mask, len(spans) - len(found), unrendered)


def _tagged(tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> list[int]:
    encoded = tokenizer.apply_chat_template(
        chat.messages, tools=chat.tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    return list(encoded["assistant_masks"])


def _starts(encoded: "BatchEncoding") -> list[int]:
    """Where in the text each token begins; some tokenizers leave a token's leading blanks out of its offsets."""
    starts, before = [], 0
    for token, (start, end) in zip(encoded.tokens(), encoded["offset_mapping"], strict=True):
        num_blanks = len(token) - len(token.lstrip("Ġ"))
        starts.append(max(min(start, before), start - num_blanks) if num_blanks else start)
        before = end
    return starts


def _mask(starts: list[int], spans: list[Span]) -> list[int]:
    """1 for tokens that begin inside a span: one that begins in the header is not the target's to write.

    The bytes of one character share its offsets, so all of them are in or out.
    """
    mask = [0] * len(starts)
    position = 0
    for begin, end in spans:
        while position < len(starts) and starts[position] < begin:
            position += 1
        while position < len(starts) and starts[position] < end:
            mask[position] = 1
            position += 1
    return mask
