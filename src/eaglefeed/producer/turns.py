"""Where the assistant's turns stand in a chat's text: found by what the template renders before and after each.

A turn has no place in a text that holds it otherwise than the target wrote it, or behind another prompt than it saw.
"""

import re
from typing import TYPE_CHECKING, Any

from eaglefeed.producer.chat import Chat, RowFault
from eaglefeed.producer.rendering import SENTINEL, render, render_turns, squeezed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["AssistantTurns", "Span"]

Span = tuple[int, int]
"""Two places in a text: where it begins, and where it has ended."""
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_OPEN_THINKING = re.compile(r"<[^<>/]*think[^<>/]*>\s*\Z")
_EMPTY_THINKING = re.compile(r"\A\s*<([^<>/]*think[^<>/]*)>\s*</\1>\n*")
_NO_THINKING = re.compile(r"<([^<>/]*think[^<>/]*)>\s*</\1>\s*\Z")
_TAG = re.compile(r"<[^<>]+>")
_REASONING = ("reasoning_content", "thinking", "reasoning")
_MAX_RENDERED, _FEW = 512, 4


class AssistantTurns:
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

    def last(self) -> tuple[str, Span]:
        """The chat's text and the last turn's place in it: as the template has it, or else as it was written.

        Raises:
            RowFault: neither can be; says why.
        """
        index = self._indices[-1]
        prompt = self._prompt(index)
        try:
            text = render(self._tokenizer, self._chat)
        except RowFault as fault:  # perhaps for what the answer holds, which no server would ask it about
            return self._as_written(index, prompt, fault)
        self._require_tool_calls(text)
        whole = self._whole(index)
        self._require_no_header(index, prompt, whole)
        self._always_closes = self._closes_every_text(whole, index)
        span = self._span(index, prompt, whole, text)
        if span and self._chat.cut_off:
            span = self._cut_off(index, prompt, whole)
        if span is None:
            text, span = self._as_written(index, prompt, self._rewritten(index))
        return text, self._weighed(index, span)

    def earlier(self, text: str, limit: int) -> list[Span | None]:
        """The places of the others that begin up to the limit; None for a turn that is not there as it was written.

        Each takes two renderings of all before it, so those behind the first 512 are left without loss.
        """
        spans: list[Span | None] = []
        for index in self._indices[:-1]:
            place = self._place(index, text) if len(spans) < _MAX_RENDERED else None
            if place is not None and place[0] > limit:  # at it, the cut may go through the first character
                break
            spans.append(place)
        return spans

    def _place(self, index: int, text: str) -> Span | None:
        try:
            prompt, whole = self._prompt(index), self._whole(index)
        except RowFault:  # the template refuses this prompt, or it is empty: no server was asked it
            return None
        span = self._span(index, prompt, whole, text)
        return span and self._weighed(index, span)

    def _weighed(self, index: int, span: Span) -> Span:
        return span if self._chat.messages[index].get("weight", 1) else (span[0], span[0])

    def _rendered(self, messages: list[dict[str, Any]], *, as_prompt: bool = False) -> str:
        return render_turns(self._tokenizer, messages, self._chat.tools, as_prompt=as_prompt)

    def _prompt(self, index: int) -> str:
        return self._rendered(self._chat.messages[:index], as_prompt=True)

    def _whole(self, index: int) -> str:
        return self._rendered(self._chat.messages[: index + 1])

    def _span(self, index: int, prompt: str, whole: str, text: str) -> Span | None:
        """Where the turn stands in the text; None if what comes before it, or itself, is rendered otherwise there."""
        if not (whole.startswith(prompt) and text.startswith(prompt)):
            return None
        message, start = self._chat.messages[index], len(prompt)
        content = _beyond_no_thinking(prompt, message["content"])
        if not _is_as_written(message | {"content": content}, prompt, whole[start:], index):
            return None
        for end in self._ends(whole):
            # Some templates put an empty thinking before the last answer, and nothing there once it is an earlier one.
            for turn in (end[start:], end[start:] if _thinking(message) else _EMPTY_THINKING.sub("", end[start:])):
                if text.startswith(turn, start):
                    return start, start + len(turn)
        return None

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

    def _require_no_header(self, index: int, prompt: str, whole: str) -> None:
        """Refuse a template that puts an answer's header behind every text: it would be taken for the turn's end."""
        if not whole.rstrip().endswith(prompt.rstrip()[-_FEW:]):  # most templates, without a rendering
            return
        turns = [*self._chat.messages[:index], self._chat.messages[index] | {"content": SENTINEL}]
        try:
            asked, plain = (self._rendered(turns, as_prompt=as_prompt) for as_prompt in (True, False))
            further = self._rendered([*turns, {"role": "user", "content": "x"}])
        except RowFault:
            return
        end, further_end = (text.rpartition(SENTINEL)[2].rstrip() for text in (plain, further))
        if asked == plain and SENTINEL in plain and not further_end.startswith(end.removesuffix(self._eos).rstrip()):
            raise RowFault("the template adds an answer's header also where none is asked for (add_generation_prompt)")

    def _require_tool_calls(self, text: str) -> None:
        turns = self._chat.messages
        bare = [{key: value for key, value in turn.items() if key != "tool_calls"} for turn in turns]
        if bare == turns:
            return
        try:
            without = self._rendered(bare)
        except RowFault:  # such as one that refuses a result without its call
            return
        if without == text:
            raise RowFault("the template renders no tool_calls: their turn would be empty (content null)")

    def _cut_off(self, index: int, prompt: str, whole: str) -> Span | None:
        """The turn up to where it was cut, since its end is not the target's; None if the template rewrites it."""
        message, start = self._chat.messages[index], len(prompt)
        content = message["content"].rstrip()
        if not content:
            return start, start
        if _closing(prompt, content) and not _thinking(message):
            return None
        marked = self._marked(index, content + SENTINEL)
        end = marked.find(SENTINEL, start)
        return (start, end) if end >= 0 and marked[:end] == whole[:end] else None

    def _rewritten(self, index: int) -> RowFault:
        fault = f"turn {index} is not rendered as the target writes it"
        if _thinking(self._chat.messages[index]):
            return RowFault(f"the template does not render its thinking: {fault}; put it into the content")
        return RowFault(f"the template rewrites earlier turns: {fault}")

    def _as_written(self, index: int, prompt: str, fault: RowFault) -> tuple[str, Span]:
        """The text of a chat whose last answer the template would rewrite: its prompt, the answer, and its end."""
        message = self._chat.messages[index]
        is_last = index + 1 == len(self._chat.messages)
        if not is_last or self.is_tagged or "tool_calls" in message or _thinking(message):
            raise fault
        try:
            _, found, end = self._marked(index, SENTINEL).rpartition(SENTINEL)
        except RowFault:  # so it is not for the answer's sake
            raise fault from None
        content = _behind(prompt, message["content"])
        if (closed := _NO_THINKING.search(prompt)) and content.lstrip().startswith(f"<{closed[1]}>"):
            raise RowFault(f"the answer has thinking: its prompt holds an empty <{closed[1]}> already")
        closing = _closing(prompt, content)
        if not found or (closing and not self._chat.cut_off):
            why = f"the answer has no thinking: its prompt opens one, and no {closing} is in it"
            raise RowFault(why) if closing else fault
        written = prompt + content
        return written + end, (len(prompt), len(written if self._chat.cut_off else (written + end).rstrip()))

    def _marked(self, index: int, content: str) -> str:
        messages = self._chat.messages
        return self._rendered([*messages[:index], messages[index] | {"content": content}])


def _template_of(tokenizer: "PreTrainedTokenizerBase", chat: Chat) -> str:
    try:
        return str(tokenizer.get_chat_template(tools=chat.tools))
    except ValueError as error:
        raise RowFault(f"the template refuses it: {str(error)[:300]}") from None


def _is_as_written(message: dict[str, Any], prompt: str, rendered: str, index: int) -> bool:
    """Whether a turn rendered behind its prompt holds content and thinking as they were given, up to white space.

    Raises:
        RowFault: it lacks a tool call.
    """
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] not in rendered:
            raise RowFault(f"the template renders no tool_calls: turn {index} lacks that of {call['function']['name']}")
    found, content = squeezed(rendered), squeezed(_behind(prompt, message["content"]))
    put_in, _, _ = found.partition(content) if content else ("", "", "")
    tag = _TAG.match(squeezed(message["content"]))
    opens_twice = tag is not None and tag[0] in put_in
    return content in found and squeezed(_thinking(message)) in found and not opens_twice


def _thinking(message: dict[str, Any]) -> str:
    """Thinking that is given beside the content, under any of the names that transformers takes."""
    return next((text for key in _REASONING if isinstance(text := message.get(key), str)), "")


def _closing(prompt: str, content: str) -> str:
    """What would end the thinking that the prompt opens, if the answer lacks it; else ""."""
    opened = _OPEN_THINKING.search(prompt)
    closing = opened[0].strip().replace("<", "</", 1) if opened else ""
    return "" if closing in content else closing


def _beyond_no_thinking(prompt: str, content: str) -> str:
    """The answer without an empty thinking, where its prompt holds that already."""
    return _EMPTY_THINKING.sub("", content) if _NO_THINKING.search(prompt) else content


def _behind(prompt: str, content: str) -> str:
    """The answer as it goes on from its prompt, which may have opened the thinking already."""
    opened, written = _OPEN_THINKING.search(prompt), content.lstrip()
    if opened is None or not written.startswith(opened[0].strip()):
        return content
    same = written.removeprefix(opened[0])
    return same if same != written else written.removeprefix(opened[0].strip()).lstrip("\n")
