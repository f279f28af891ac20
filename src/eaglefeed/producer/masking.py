"""Chats to tokens: the target's own template over the whole conversation, and a loss mask on what the target writes.

For every assistant turn the template is asked what it renders before and after it. The text in between is the turn: its
header lies before, its end-of-turn marker inside, white space behind the marker outside. It gets loss only if the text
holds it as the target wrote it, behind the prompt that the target saw.
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.rendering import SENTINEL, render, render_turns, squeezed, unrendered_roles

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

__all__ = ["TokenizedChat", "tokenize_chat"]

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OPEN_THINKING = re.compile(r"<[^<>/]*think[^<>/]*>\s*\Z")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_Span = tuple[int, int]


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
        max_length: how many tokens matter: turns behind them are not looked for, which takes a rendering each.

    Raises:
        RowFault: the template refuses the chat, drops its tool calls, or rewrites its last turn.
    """
    turns = _Turns(tokenizer, chat)
    text, last = turns.last(render(tokenizer, chat))
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False)
    starts = _starts(encoded)
    limit = len(text) if max_length is None or max_length >= len(starts) else starts[max_length]
    spans = [*turns.earlier(text, limit), last]
    found = [span for span in spans if span is not None]
    mask = _mask(starts, found)
    if turns.is_tagged:
        mask = [one & other for one, other in zip(mask, _tagged(tokenizer, chat), strict=True)]
    return TokenizedChat(encoded["input_ids"], mask, len(spans) - len(found), unrendered_roles(tokenizer, chat, text))


class _Turns:
    """Where the assistant's turns of a chat stand in its text.

    Raises:
        RowFault: it has none that answers something.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> None:
        self._tokenizer, self._chat, self._eos = tokenizer, chat, str(tokenizer.eos_token or "")
        self.is_tagged = bool(_GENERATION_TAG.search(_template_of(tokenizer, chat)))
        self._indices = [index for index, message in enumerate(chat.messages) if message["role"] == "assistant"]
        if not self._indices:
            raise RowFault("no assistant turn")
        if self._indices == [0]:
            raise RowFault("no assistant turn that answers something: a server never answers an empty conversation")
        self._always_closes = False

    def last(self, text: str) -> tuple[str, _Span]:
        """The last turn's place, in this text or in one that holds it as it was written.

        Raises:
            RowFault: neither can be; says why.
        """
        index = self._indices[-1]
        prompt, whole = self._prompt(index), self._whole(index)
        self._require_tool_calls(text)
        self._always_closes = self._closes_every_text(whole, index)
        span = self._span(index, prompt, whole, text)
        if span and self._chat.cut_off:
            span = self._cut_off(span, index)
        return (text, span) if span else self._as_written(index, prompt)

    def earlier(self, text: str, limit: int) -> list[_Span | None]:
        """The places of the others that begin before the limit; None for a turn that is not there as it was written."""
        spans: list[_Span | None] = []
        for index in self._indices[:-1]:
            try:
                prompt = self._prompt(index) if index else ""
                if len(prompt) >= limit:
                    break
                # A server never answers an empty conversation, so nobody wrote a first turn.
                spans.append(self._span(index, prompt, self._whole(index), text) if index else None)
            except RowFault:  # the template refuses this prompt, so no server was asked it
                spans.append(None)
        return spans

    def _rendered(self, messages: list[dict[str, Any]], *, as_prompt: bool = False) -> str:
        return render_turns(self._tokenizer, messages, self._chat.tools, as_prompt=as_prompt)

    def _prompt(self, index: int) -> str:
        # Templates with tags may know no header of an answer; there the tags leave it out.
        return self._rendered(self._chat.messages[:index], as_prompt=not self.is_tagged)

    def _whole(self, index: int) -> str:
        return self._rendered(self._chat.messages[: index + 1])

    def _span(self, index: int, prompt: str, whole: str, text: str) -> _Span | None:
        """Where the turn stands in the text; None if what comes before it, or itself, is rendered otherwise there."""
        end = next((len(each) for each in self._ends(whole) if text.startswith(each)), None)
        if end is None or not (whole.startswith(prompt) and text.startswith(prompt)):
            return None
        is_there = _is_as_written(self._chat.messages[index], whole[len(prompt) :], index)
        return (len(prompt), max(end, len(prompt))) if is_there else None

    def _ends(self, whole: str) -> list[str]:
        """The text up to the turn's end; for templates that close every text, or the last turn alone, without that."""
        full = whole.rstrip()
        bare = full.removesuffix(self._eos).rstrip() if self._eos else full
        return [bare] if self._always_closes else [full, bare]

    def _closes_every_text(self, whole: str, index: int) -> bool:
        """Whether an end of text stands behind the end-of-turn marker, which a server never waits for."""
        full = whole.rstrip()
        bare = full.removesuffix(self._eos).rstrip()
        if bare == full or not bare.endswith(tuple(self._tokenizer.get_added_vocab())):
            return False
        try:
            asked = self._rendered(self._chat.messages[: index + 1], as_prompt=True)
        except RowFault:
            return False
        return asked.startswith(bare) and not asked.startswith(full)

    def _require_tool_calls(self, text: str) -> None:
        turns = self._chat.messages
        bare = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
        if bare != turns and self._rendered(bare) == text:
            raise RowFault("the template renders no tool_calls: their turn would be empty (content null)")

    def _cut_off(self, span: _Span, index: int) -> _Span | None:
        """The turn up to where it was cut, since its end is not the target's; None if the template rewrites it."""
        message, start = self._chat.messages[index], span[0]
        content = message["content"].rstrip()
        if not content:
            return start, start
        whole = self._whole(index)
        marked = self._rendered([*self._chat.messages[:index], message | {"content": content + SENTINEL}])
        end = marked.find(SENTINEL, start)
        if end < 0 or marked[:end] != whole[:end]:
            return None
        return (start, end) if _thinking(message) or squeezed(whole[start:end]) == squeezed(content) else None

    def _as_written(self, index: int, prompt: str) -> tuple[str, _Span]:
        """The text of a chat whose last answer the template would rewrite: its prompt, the answer, and its end."""
        message, fault = self._chat.messages[index], f"turn {index} is not rendered as the target writes it"
        if index + 1 < len(self._chat.messages) or self.is_tagged or "tool_calls" in message:
            raise RowFault(f"the template rewrites earlier turns: {fault}")
        if _thinking(message):
            raise RowFault(f"the template does not render its thinking: {fault}; put it into the content")
        marked = self._rendered([*self._chat.messages[:index], message | {"content": SENTINEL}])
        _, found, end = marked.rpartition(SENTINEL)
        if not found:
            raise RowFault(f"the template rewrites earlier turns: {fault}")
        written = prompt + _behind(prompt, message["content"], may_think_on=self._chat.cut_off)
        return written + end, (len(prompt), len(written if self._chat.cut_off else (written + end).rstrip()))


def _template_of(tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=chat.tools))
    except ValueError as error:
        raise RowFault(f"the template refuses it: {str(error)[:300]}") from None


def _is_as_written(message: dict[str, Any], rendered: str, index: int) -> bool:
    """Whether a rendered turn holds content and thinking as they were given, up to white space.

    Raises:
        RowFault: it lacks a tool call.
    """
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in rendered:
            raise RowFault(f"the template renders no tool_calls: turn {index} lacks that of {call['function']['name']}")
    found = squeezed(rendered)
    return all(squeezed(text) in found for text in (message["content"], _thinking(message)))


def _thinking(message: dict[str, Any]) -> str:
    """Thinking that is given beside the content, under any of the names that transformers takes."""
    return next((text for key in _REASONING if isinstance(text := message.get(key), str)), "")


def _behind(prompt: str, content: str, *, may_think_on: bool) -> str:
    """The answer as it goes on from its prompt, which may have opened the thinking already.

    Raises:
        RowFault: the prompt opens the thinking, and the answer has none.
    """
    opened = _OPEN_THINKING.search(prompt)
    if opened is None:
        return content
    tag = opened[0].strip()
    if content.lstrip().startswith(tag):
        return content.lstrip().removeprefix(tag).lstrip("\n")
    closing = tag.replace("<", "</", 1)
    if closing not in content and not may_think_on:
        raise RowFault(f"the answer has no thinking: its prompt ends in {tag}, and no {closing} is in it")
    return content


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


def _mask(starts: list[int], spans: list[_Span]) -> list[int]:
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
